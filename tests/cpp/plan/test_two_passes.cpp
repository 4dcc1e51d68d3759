// The planner where forward runs twice unless its graph is kept.
#include "plan/planner_machine.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace infinitybatch::testing {
namespace {

/// A coupled loss: forward is recorded without a graph, and runs again unless its graph is kept.
class TwoPassMachine {
 public:
  static constexpr int64_t kSamples = 64;
  static constexpr int64_t kGraph = 1000;  // bytes a sample
  static constexpr double kAgain = 0.6e-3;

  static Request request(int64_t graphs) {
    Request request;
    request.signature = "sample";
    request.batch_size = kSamples;
    request.baseline_bytes = kBaseline;
    request.budget_bytes = kBaseline + graphs * kGraph + 500;
    request.two_pass = true;
    return request;
  }

  /// Larger ones are a bit faster, or by what each takes beside its samples.
  /// \param loss bytes that it takes while all graphs are held
  explicit TwoPassMachine(double beside = 0, int64_t loss = 0) : beside_(beside), loss_(loss) {}

  double seconds_per_sample(int64_t size) const {
    return 1e-3 + 2e-5 * std::log2(double(kSamples) / double(size)) + beside_ / double(size);
  }

  static MicroBatchTrace trace(int64_t size) {
    static const char memory[2] = {};
    MicroBatchTrace trace;
    trace.size = size;
    const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
    starts();  // record: its graph goes at once
    trace.events.push_back({memory, kGraph * size});
    trace.events.push_back({memory, -kGraph * size});
    starts();  // replay
    trace.events.push_back({memory + 1, kGraph * size});
    starts();  // seed
    starts();  // backward
    trace.events.push_back({memory + 1, -kGraph * size});
    starts();  // free
    return trace;
  }

  /// Steps with room for so many samples' graphs until nothing is left to time.
  void settle(Planner& planner, int64_t graphs) const {
    for (int step = 0; step < 40 && !planner.settled_for(request(graphs)); ++step) {
      planner.begin(request(graphs));
      while (const auto piece = planner.next()) {
        Measurement measured;
        for (const int64_t size : piece->plan.micro_batch_sizes) {
          measured.seconds.push_back(seconds_per_sample(size) * double(size));
          measured.again.push_back(kAgain * double(size));
        }
        if (piece->trace) measured.trace = trace(piece->plan.micro_batch_size());
        measured.peak_bytes = kBaseline + kGraph * piece->plan.micro_batch_size();
        planner.observe(*piece, measured);
      }
      planner.saw_whole_loss(planner.two_pass().plan, {loss_, 0});
    }
    EXPECT_TRUE(planner.settled());
  }

  Plan plan(int64_t graphs) const {
    Planner planner;
    settle(planner, graphs);
    EXPECT_EQ(planner.plan().micro_batch_size(), planner.two_pass().plan.micro_batch_size());
    return planner.plan();
  }

 private:
  double beside_;
  int64_t loss_;
};

TEST(Planner, WeighsTheGraphsThatFitAgainstFasterSizesThatKeepFewer) {
  constexpr int64_t kSamples = TwoPassMachine::kSamples;
  const TwoPassMachine machine;
  for (const int64_t graphs : {5, 12, 20, 33, 40, 44, 50, 56, 63, 64}) {
    const Plan plan = machine.plan(graphs);
    // The graphs kept lie beside the one whose forward runs, and go one by one: all that fits.
    double best = INFINITY;
    for (int64_t size = 2; size <= std::min(graphs, kSamples); size *= 2) {
      const double kept = double(graphs / size * size) / double(kSamples);
      const double seconds = machine.seconds_per_sample(size) - kept * TwoPassMachine::kAgain;
      best = std::min(best, seconds * double(kSamples));
    }
    ASSERT_TRUE(plan.predicted_seconds.has_value());
    EXPECT_LE(*plan.predicted_seconds, 1.0001 * best) << graphs << '\n' << plan.explain();
    EXPECT_LE(plan.retained_samples(), graphs);
  }
  EXPECT_EQ(machine.plan(64).micro_batch_size(), kSamples);
}

TEST(Planner, SaysNoSmallestBudgetBeforeTheLossOfAllHasRun) {
  for (const bool seen : {false, true}) {
    Request request = TwoPassMachine::request(/*graphs=*/8);
    Planner planner;
    planner.begin_rehearsal(request);
    while (const auto piece = planner.next()) {
      Measurement measured;
      const int64_t size = piece->plan.micro_batch_size();
      measured.seconds.assign(piece->plan.micro_batch_sizes.size(), 1e-3);
      if (piece->trace) measured.trace = TwoPassMachine::trace(size);
      measured.peak_bytes = kBaseline + TwoPassMachine::kGraph * size;
      planner.observe(*piece, measured);
    }
    planner.begin(request);
    constexpr int64_t kLoss = 5000;
    if (seen) planner.saw_whole_loss(planner.two_pass().plan, {kLoss, kLoss});
    request.baseline_bytes = request.budget_bytes - 500;
    try {
      planner.begin(request);
      FAIL() << "a sample takes 1000 bytes";
    } catch (const BudgetExceeded& error) {
      EXPECT_EQ(error.smallest_feasible().has_value(), seen);
      EXPECT_GE(error.needed(), request.baseline_bytes + (seen ? kLoss : TwoPassMachine::kGraph));
      if (!seen) continue;
      request.budget_bytes = *error.smallest_feasible();
      EXPECT_NO_THROW(planner.begin(request));
    }
  }
}

TEST(Planner, KeepsThePartOfAMicroBatchForWhichThereIsRoom) {
  const TwoPassMachine machine;
  for (const int64_t graphs : {20, 33, 40, 44, 50, 56}) {
    const Plan plan = machine.plan(graphs);
    const int64_t worthless = plan.micro_batch_size() / 4;  // and eighths are what it is cut into
    EXPECT_LE(plan.retained_samples(), graphs);
    EXPECT_GT(plan.retained_samples(), graphs - worthless) << plan.explain();
    const auto& sizes = plan.micro_batch_sizes;
    EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), plan.batch_size);
    // One micro-batch became two, and no more than one.
    EXPECT_LE(std::ranges::count_if(sizes, [&](int64_t size) { return size != sizes.front(); }), 2);
  }
}

TEST(Planner, MakesNoMicroBatchTwoWhereEachTakesLongBesideItsSamples) {
  // A forward of half of the samples takes .6 ms each, and a micro-batch 40 ms by itself.
  const TwoPassMachine machine(/*beside=*/40e-3);
  for (const int64_t graphs : {20, 33, 40, 44, 50, 56}) {
    const Plan plan = machine.plan(graphs);
    const auto& sizes = plan.micro_batch_sizes;
    EXPECT_TRUE(std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes.front(); }))
        << plan.explain();
  }
}

TEST(Planner, SplitsNoMicroBatchThatAloneIsExact) {
  // The whole batch fits, and its graph beside the loss does not.
  const TwoPassMachine machine(/*beside=*/0, /*loss=*/30 * TwoPassMachine::kGraph);
  Planner planner;
  machine.settle(planner, 70);
  EXPECT_GT(planner.plan().micro_batch_sizes.size(), 1u);
  Request coupled = TwoPassMachine::request(70);
  coupled.whole_batch_only = true;
  planner.begin(coupled);
  EXPECT_EQ(planner.two_pass().plan.micro_batch_sizes,
            std::vector<int64_t>{TwoPassMachine::kSamples});
}

TEST(Planner, KeepsWholeGraphsAloneOnceMemoryHasRunOut) {
  const TwoPassMachine machine;
  Planner planner;
  machine.settle(planner, 44);
  EXPECT_EQ(planner.two_pass().plan.retained_samples(), 44);
  planner.ran_out_of_memory(1 << 20);
  const Plan plan = planner.two_pass().plan;
  EXPECT_EQ(plan.retained_samples() % plan.micro_batch_sizes.back(), 0);
  EXPECT_LE(plan.retained_samples(), 22);
}

TEST(Timings, TellThePartOfAMicroBatchThatIsWorthAnother) {
  // Each sample takes 3 ms and each micro-batch 8 ms, of which forward is 1 and 2.
  const auto learn = [](Timings& timings, int64_t size) {
    const std::vector<double> seconds(4, 3e-3 * double(size) + 8e-3);
    const std::vector<double> again(4, 1e-3 * double(size) + 2e-3);
    timings.learn(size, {.size = size, .seconds = seconds, .again = again});
  };
  Timings timings;
  EXPECT_EQ(timings.part_that_pays(16), INFINITY);
  learn(timings, 16);
  learn(timings, 14);
  EXPECT_EQ(timings.part_that_pays(16), INFINITY);  // the two are close
  learn(timings, 8);
  const double again = 1e-3 + 2e-3 / 16;
  EXPECT_NEAR(timings.part_that_pays(16), 8e-3 / (16 * again), 1e-9);
  EXPECT_NEAR(timings.part_that_pays(15), timings.part_that_pays(16), 1e-9);
}

/// What is live beside a rehearsal is not what is live beside the step.
TEST(Planner, OnlyTheStepIsRefused) {
  const TwoPassMachine machine;
  Planner planner;
  machine.settle(planner, 40);
  Request beside_more = TwoPassMachine::request(40);
  beside_more.baseline_bytes = beside_more.budget_bytes;
  planner.begin_rehearsal(beside_more);
  EXPECT_TRUE(planner.nothing_fits());
  EXPECT_FALSE(planner.next().has_value());
  EXPECT_THROW(planner.begin(beside_more), BudgetExceeded);
  planner.begin(TwoPassMachine::request(40));
  EXPECT_FALSE(planner.nothing_fits());
}

TEST(Planner, KnowsWhereThereIsNothingToRehearse) {
  const TwoPassMachine machine;
  Planner planner;
  EXPECT_FALSE(planner.settled_for(TwoPassMachine::request(40)));
  machine.settle(planner, 40);
  Request again = TwoPassMachine::request(40);
  EXPECT_TRUE(planner.settled_for(again));
  again.baseline_bytes += 7;  // one step follows a plan that is not settled, the next rehearses
  EXPECT_TRUE(planner.settled_for(again));
  planner.begin(again);
  EXPECT_FALSE(planner.settled_for(again));
  for (const auto& change : std::vector<std::function<void(Request&)>>{
           [](Request& request) { request.batch_size -= 1; },
           [](Request& request) { request.budget_bytes += 1; },
           [](Request& request) { request.signature += "!"; },
           [](Request& request) { request.dims = {{3}}; }}) {
    Request other = TwoPassMachine::request(40);
    change(other);
    EXPECT_FALSE(planner.settled_for(other));
  }
  machine.settle(planner, 40);
  EXPECT_TRUE(planner.settled_for(again));
  planner.ran_out_of_memory(1 << 20);
  EXPECT_FALSE(planner.settled_for(again));
}

/// Behind `wrap`: micro-batches that were timed, and no profile, for no second trace had room.
TEST(Planner, PlansNoSizeAgainOfWhichTheSecondPassHasRunOut) {
  Request request = TwoPassMachine::request(3);
  request.whole_loss = true;
  Planner planner;
  const auto step = [&](int64_t peak) {
    planner.begin(request);
    while (const auto piece = planner.next()) {
      if (piece->plan.micro_batch_size() > 2) {  // the larger probe
        planner.ran_out_of_memory(request.budget_bytes + 1);
        planner.begin(request);
        continue;
      }
      Measurement measured;
      measured.seconds.assign(piece->plan.micro_batch_sizes.size(), 1e-3);
      measured.peak_bytes = kBaseline + 1000 * piece->plan.micro_batch_size();
      planner.observe(*piece, measured);
    }
    const Piece piece = planner.two_pass();
    planner.saw_whole_loss(piece.plan, {0, 0});
    planner.saw_second_pass(kBaseline);
    if (peak * piece.size > request.budget_bytes - kBaseline) planner.second_pass_ran_out(piece);
    return piece.size;
  };
  for (int64_t before = step(2000); before > 1;) {
    const int64_t now = step(2000);
    ASSERT_LT(now, before);
    before = now;
  }
  for (int i = 0; i < 40; ++i) EXPECT_EQ(step(2000), 1) << i;
  request.budget_bytes += 2000;  // more room than it had then
  EXPECT_GT(step(2000), 1);
}

TEST(Planner, GoesOnWithAStepThatWasMeasuredWhereNoOtherIsForeseenToFit) {
  const TwoPassMachine machine(/*beside=*/0, /*loss=*/0);
  Planner planner;
  machine.settle(planner, 40);
  const Piece piece = planner.two_pass();
  Measurement measured;
  const Request request = TwoPassMachine::request(40);
  measured.peak_bytes = request.budget_bytes - 100;
  planner.observe(piece, measured);
  // A loss that takes a little more than any before: what was measured goes up by that.
  planner.saw_whole_loss(piece.plan, {100, 0});
  planner.begin(request);
  EXPECT_FALSE(planner.nothing_fits());
}

}  // namespace
}  // namespace infinitybatch::testing
