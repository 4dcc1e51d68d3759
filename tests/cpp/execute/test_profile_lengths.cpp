// Bytes of a micro-batch as a function of rows and of their length, from traces of a few lengths.
#include "execute/profile.hpp"
#include "execute/schedule.hpp"
#include "execute/simulator.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

namespace infinitybatch::of_profile_lengths {
namespace {

using Bytes = std::function<int64_t(int64_t rows, int64_t length)>;

/// A micro-batch that makes these blocks in its forward, one after the other, and lets go of them
/// in its backward.
MicroBatchTrace trace_of(const std::vector<Bytes>& blocks, int64_t rows, int64_t length) {
  static const char memory[16] = {};
  MicroBatchTrace trace;
  trace.size = rows;
  trace.length = length;
  const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
  starts();  // load
  starts();  // forward
  for (size_t i = 0; i < blocks.size(); ++i) {
    trace.events.push_back({memory + i, blocks[i](rows, length)});
  }
  starts();  // loss
  starts();  // backward
  for (size_t i = 0; i < blocks.size(); ++i) {
    trace.events.push_back({memory + i, -blocks[i](rows, length)});
  }
  starts();  // free
  return trace;
}

/// Fit at length 100, with traces of further lengths.
MicroBatchProfile profile_of(const std::vector<Bytes>& blocks,
                             const std::vector<int64_t>& further = {}) {
  auto profile = MicroBatchProfile::fit(trace_of(blocks, 2, 100), trace_of(blocks, 4, 100));
  EXPECT_TRUE(profile.has_value());
  for (const int64_t length : further) {
    EXPECT_TRUE(profile->learn(trace_of(blocks, 2, length))) << length;
  }
  return *profile;
}

int64_t predicted(const MicroBatchProfile& profile, int64_t rows, int64_t length) {
  return profile.effect(Operation::forward, {static_cast<double>(rows), length}, true).rise;
}

int64_t total(const std::vector<Bytes>& blocks, int64_t rows, int64_t length) {
  int64_t bytes = 0;
  for (const Bytes& block : blocks) bytes += block(rows, length);
  return bytes;
}

const Bytes kTokens = [](int64_t r, int64_t l) { return 8 * r * l; };
const Bytes kScores = [](int64_t r, int64_t l) { return 4 * r * l * l; };
const Bytes kMask = [](int64_t, int64_t l) { return l * l; };
const Bytes kPositions = [](int64_t, int64_t l) { return 64 * l; };
const Bytes kPooled = [](int64_t r, int64_t) { return 48 * r; };
const Bytes kWorkspace = [](int64_t, int64_t) { return int64_t{5000}; };
const Bytes kWithToken = [](int64_t r, int64_t l) { return 16 * r * (l + 1) * l; };
const std::vector<Bytes> kAll = {kTokens,    kScores, kMask,     kPositions,
                                 kWorkspace, kPooled, kWithToken};

TEST(ProfileLengths, ThreeLengthsTellAllOthersExactly) {
  const MicroBatchProfile profile = profile_of(kAll, {60, 20});
  EXPECT_EQ(profile.lengths(), (std::vector<int64_t>{20, 60, 100}));
  for (const int64_t length : {1, 7, 20, 33, 60, 61, 99, 100, 101, 250}) {
    for (const int64_t rows : {1, 3, 64}) {
      EXPECT_EQ(predicted(profile, rows, length), total(kAll, rows, length))
          << rows << " rows of " << length;
    }
  }
}

TEST(ProfileLengths, ATraceMayHaveAnyNumberOfRows) {
  auto profile = MicroBatchProfile::fit(trace_of(kAll, 2, 100), trace_of(kAll, 4, 100));
  ASSERT_TRUE(profile);
  EXPECT_TRUE(profile->learn(trace_of(kAll, 31, 50)));
  EXPECT_TRUE(profile->learn(trace_of(kAll, 9, 10)));
  EXPECT_EQ(predicted(*profile, 5, 77), total(kAll, 5, 77));
}

TEST(ProfileLengths, UntilThreeAreKnownItIsABound) {
  for (const Bytes& block : kAll) {
    for (const std::vector<int64_t>& further :
         {std::vector<int64_t>{}, std::vector<int64_t>{40}, std::vector<int64_t>{300}}) {
      const MicroBatchProfile profile = profile_of({block}, further);
      for (const int64_t length : {5, 39, 40, 41, 70, 99, 100, 101, 299, 301, 600}) {
        const int64_t rows = 8;
        // Of l + 1 the square is short by less than a third of a hundredth.
        EXPECT_GE(static_cast<double>(predicted(profile, rows, length)),
                  .99 * static_cast<double>(block(rows, length)))
            << length;
      }
      EXPECT_EQ(predicted(profile, 8, 100), block(8, 100));
      for (const int64_t length : further) {
        EXPECT_EQ(predicted(profile, 8, length), block(8, length));
      }
    }
  }
}

TEST(ProfileLengths, StepsOfAKernelStayNearThem) {
  // Rounded up to blocks of 64 positions, and at most 512 of them, as a kernel's workspace is.
  const Bytes steps = [](int64_t r, int64_t l) {
    return 32 * r * std::min<int64_t>(512, (l + 63) / 64 * 64);
  };
  const std::vector<Bytes> blocks = {kTokens, kScores, steps};
  auto profile = profile_of(blocks, {300, 200, 40});
  for (const int64_t length : {40, 70, 100, 150, 200, 230, 300}) {
    const auto wanted = static_cast<double>(total(blocks, 16, length));
    EXPECT_NEAR(static_cast<double>(predicted(profile, 16, length)), wanted, .06 * wanted)
        << length;
  }
  // A trace where it was wrong puts it right there.
  ASSERT_TRUE(profile.learn(trace_of(blocks, 2, 70)));
  EXPECT_EQ(predicted(profile, 16, 70), total(blocks, 16, 70));
}

TEST(ProfileLengths, AnotherStoryIsNotLearned) {
  auto profile = profile_of(kAll);
  std::vector<Bytes> more = kAll;
  more.push_back(kPooled);
  EXPECT_FALSE(profile.learn(trace_of(more, 2, 50)));
  EXPECT_EQ(profile.lengths(), (std::vector<int64_t>{100}));
  auto alike = MicroBatchProfile::fit(trace_of(kAll, 2, 0), trace_of(kAll, 4, 0));
  EXPECT_FALSE(alike->learn(trace_of(kAll, 2, 50))) << "not fit at a length";
  EXPECT_FALSE(MicroBatchProfile::fit(trace_of(kAll, 2, 100), trace_of(kAll, 4, 50)));
}

TEST(ProfileLengths, RowsOfOneLengthAreWhatTheyWere) {
  const MicroBatchProfile profile = profile_of(kAll, {60, 20});
  for (const int64_t rows : {1, 2, 7}) {
    EXPECT_EQ(profile.effect(Operation::forward, rows, true).rise, total(kAll, rows, 100));
  }
}

TEST(ProfileLengths, TheSimulatorTellsEachMicroBatchAtItsLength) {
  const MicroBatchProfile profile = profile_of(kAll, {60, 20});
  Plan plan = stream_plan({2, 9, 40}, /*penalty=*/false);
  plan.lengths = {120, 50, 12};
  const int64_t most = std::max({total(kAll, 2, 120), total(kAll, 9, 50), total(kAll, 40, 12)});
  EXPECT_EQ(simulate_peak(plan, profile, /*baseline=*/1000), 1000 + most);
  plan.lengths = {100, 100, 100};
  const int64_t in_full = simulate_peak(plan, profile, 1000);
  plan.lengths.clear();
  EXPECT_EQ(simulate_peak(plan, profile, 1000), in_full);
}

}  // namespace
}  // namespace infinitybatch::of_profile_lengths
