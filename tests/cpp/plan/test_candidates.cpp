// The sizes that fit, and the choice among them, from what was learned alone.
#include "plan/candidates.hpp"
#include "plan/probes.hpp"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace infinitybatch::plan {
namespace {

constexpr int64_t kPerSample = 100;
using Caps = std::vector<int64_t>;

/// Room for ten samples.
Request request_for(int64_t samples) {
  Request request;
  request.batch_size = samples;
  request.baseline_bytes = 1000;
  request.budget_bytes = request.baseline_bytes + 10 * kPerSample;
  return request;
}

/// Four samples were measured, and sizes timed: seconds of a micro-batch.
Learned learned(const std::map<int64_t, double>& times = {}) {
  Learned learned;
  learned.peaks[4] = 4 * kPerSample;
  for (const auto& [size, seconds] : times) {
    const std::vector<double> all(16, seconds);
    learned.timings.learn(size, {size, all, {}});
  }
  return learned;
}

TEST(Candidates, ArePowersOfTwoAndTheLargestThatFits) {
  EXPECT_EQ(Candidates(request_for(64), learned()).caps(), (Caps{2, 4, 8, 10}));
  EXPECT_EQ(Candidates(request_for(4), learned()).caps(), (Caps{2, 4}));
}

TEST(Candidates, AreTheWholeBatchTooWhereItsHalvesDoNotFit) {
  Learned known = learned();
  known.steps[{64, 64}] = 10 * kPerSample;
  EXPECT_EQ(Candidates(request_for(64), known).caps(), (Caps{2, 4, 8, 10, 64}));
  known.steps[{64, 64}] += 1;
  EXPECT_EQ(Candidates(request_for(64), known).caps(), (Caps{2, 4, 8, 10}));
}

TEST(Candidates, AreOneWhereOnlyOneSplitIsExactOrPossible) {
  Request request = request_for(64);
  request.whole_batch_only = true;
  EXPECT_EQ(Candidates(request, learned()).caps(), Caps{64});
  request = request_for(64);
  request.fails_on = 3;
  EXPECT_EQ(Candidates(request, learned()).caps(), Caps{10});
  request.fails_on = 10;
  EXPECT_TRUE(Candidates(request, learned()).empty());
  Learned short_of_memory = learned();
  ASSERT_TRUE(short_of_memory.shortages.find_last_resort(request_for(64)));
  EXPECT_EQ(Candidates(request_for(64), short_of_memory).caps(), Caps{2});
}

/// One micro-batch was measured, and boundary activations of all samples wait beside it.
TEST(Candidates, LeaveRoomForWhatWaitsOfTheWholeBatch) {
  Request request = request_for(64);
  request.two_pass = true;
  request.segments = 3;
  EXPECT_EQ(Candidates(request, learned()).caps(), (Caps{2, 4, 8, 10}));
  request.waiting_bytes = 6 * kPerSample;
  EXPECT_EQ(Candidates(request, learned()).caps(), (Caps{2, 4}));
  request.waiting_bytes = 20 * kPerSample;
  EXPECT_TRUE(Candidates(request, learned()).empty());
}

/// Where memory depends on values what was measured is a bound, with a margin; what waits is told.
TEST(Candidates, HaveAMarginForWhatWasMeasuredAlone) {
  Request request = request_for(64);
  request.two_pass = true;
  request.segments = 3;
  Learned irregular = learned();
  irregular.irregular = true;
  EXPECT_EQ(Candidates(request, irregular).caps(), (Caps{2, 4, 8}));
  request.waiting_bytes = 5 * kPerSample;
  EXPECT_EQ(Candidates(request, irregular).caps(), (Caps{2, 4}));
  // A size is bounded by the next larger one that was measured, not by the largest.
  irregular.peaks[8] = 20 * kPerSample;
  EXPECT_EQ(Candidates(request, irregular).caps(), (Caps{2, 4}));
}

/// Of cut tapes a probe runs by itself.
TEST(Candidates, LeaveProbesTheRoomInWhichOthersWillWait) {
  Request request = request_for(64);
  request.measured = request.two_pass = true;
  request.segments = 3;
  request.waiting_bytes = 9 * kPerSample;
  Learned first;
  first.peaks[2] = 2 * kPerSample;
  EXPECT_FALSE(Prediction(request, first).fits(4));
  EXPECT_TRUE(Prediction(request, first).fits_alone(4));
  EXPECT_EQ(probe_size(request, first), 4);
}

TEST(Candidates, OfCutTapesAreTimedFromTheLargestDownUntilTwoAreSlower) {
  Request request = request_for(64);
  request.two_pass = true;
  request.segments = 3;
  const Candidates::Progress at_the_start;
  const auto next = [&](const std::map<int64_t, double>& times) {
    return Candidates(request, learned(times)).to_time(at_the_start);
  };
  EXPECT_EQ(next({}), 10);
  EXPECT_EQ(next({{10, 1.0}}), 8);
  EXPECT_EQ(next({{10, 1.0}, {8, 0.7}}), 4);
  EXPECT_EQ(next({{10, 1.0}, {8, 1.0}}), 4) << "one that is slower may be by chance";
  EXPECT_EQ(next({{10, 1.0}, {8, 1.0}, {4, 1.0}}), std::nullopt);
  EXPECT_EQ(next({{10, 1.0}, {8, 1.3}}), std::nullopt) << "one that is far slower is not";
}

TEST(Candidates, TimeDecidesInsideTheBytes) {
  const Request request = request_for(64);
  // Sixteen at once would be the fastest, and do not fit.
  const Learned known = learned({{2, 0.5}, {4, 0.4}, {8, 1.0}, {10, 1.5}, {16, 0.1}});
  EXPECT_EQ(Candidates(request, known).fastest(), 4);
  Request roomy = request;
  roomy.budget_bytes *= 2;
  EXPECT_EQ(Candidates(roomy, known).fastest(), 16);
  EXPECT_EQ(Candidates(request, learned()).fastest(), 4) << "what probes have shown to work";
}

TEST(Candidates, OfAWholeBatchThatFitsTheSplitMustSaveThreePercent) {
  const Request request = request_for(8);
  EXPECT_EQ(Candidates(request, learned({{4, 0.98}, {8, 2.0}})).fastest(), 8);
  EXPECT_EQ(Candidates(request, learned({{4, 0.96}, {8, 2.0}})).fastest(), 4);
}

TEST(Shortages, AreForgottenAfterEverLongerTimesWithoutOne) {
  Shortages shortages;
  EXPECT_FALSE(shortages.may_try_again());
  for (const int calm : {16, 32, 64}) {
    shortages.lower_size(7);
    EXPECT_TRUE(shortages.allows(7));
    for (int attempt = 0; attempt < calm; ++attempt) {
      EXPECT_FALSE(shortages.allows(8));
      EXPECT_FALSE(shortages.may_try_again()) << attempt << " of " << calm;
    }
    EXPECT_TRUE(shortages.may_try_again());
    EXPECT_TRUE(shortages.allows(8));
  }
}

TEST(Shortages, ASmallSizeIsTheLastResortUntilItFailsInTheSameStep) {
  Shortages shortages;
  const Request request = request_for(64);
  ASSERT_TRUE(shortages.find_last_resort(request));
  EXPECT_EQ(shortages.last_resort(), 2);
  EXPECT_FALSE(shortages.fail(2));
  ASSERT_TRUE(shortages.find_last_resort(request));
  EXPECT_EQ(shortages.last_resort(), 1);
  EXPECT_FALSE(shortages.fail(1));
  EXPECT_FALSE(shortages.find_last_resort(request));
  shortages.end_step();
  EXPECT_TRUE(shortages.find_last_resort(request));
}

}  // namespace
}  // namespace infinitybatch::plan
