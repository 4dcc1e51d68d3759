// What the planner does about memory that ran out, and what it says where nothing fits.
#include "plan/planner_machine.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace infinitybatch::testing {
namespace {

/// Somebody else held memory for a while: what failed then is tried again, ever more seldom.
TEST(Planner, SizesThatRanOutOfMemoryAreTriedAgain) {
  Machine machine{[](int64_t n) { return 2e-5 + 1e-3 / double(n); }};
  const Request wanted = request(64, 1 << 20);
  Planner planner;
  for (int i = 0; i < 40; ++i) run(planner, machine, wanted);
  const int64_t before = run(planner, machine, wanted).sizes.front();
  ASSERT_GT(before, 4);
  std::vector<int> tried;  // steps in which the size of before ran, though it fails again
  for (int i = 0, failures = 0; i < 200; ++i) {
    planner.begin(wanted);
    const auto piece = planner.next();
    ASSERT_TRUE(piece);
    if (piece->plan.micro_batch_sizes.front() < before) continue;
    tried.push_back(i);
    planner.ran_out_of_memory(2 << 20);
    ++failures;
  }
  ASSERT_GE(tried.size(), 3u);
  ASSERT_LE(tried.size(), 6u);
  for (size_t i = 2; i < tried.size(); ++i) {
    EXPECT_GE(tried[i] - tried[i - 1], 2 * (tried[i - 1] - tried[i - 2]) - 1);
  }
  for (int i = 0; i < 600; ++i) run(planner, machine, wanted);  // it does not fail any more
  EXPECT_EQ(run(planner, machine, wanted).sizes.front(), before);
}

TEST(Planner, PlansSmallerAfterRunningOutOfMemoryUntilNothingIsLeft) {
  Planner planner;
  const Request small = request(64, 5000);
  planner.begin(small);
  ASSERT_EQ(planner.next()->plan.micro_batch_size(), 2);
  planner.ran_out_of_memory(6000);
  planner.begin(small);
  ASSERT_EQ(planner.next()->plan.micro_batch_size(), 1);
  try {
    planner.ran_out_of_memory(5900);
    FAIL() << "expected BudgetExceeded";
  } catch (const BudgetExceeded& error) {
    EXPECT_EQ(error.needed(), 5900);
    EXPECT_EQ(error.limit(), 5000);
    EXPECT_FALSE(error.smallest_feasible().has_value());
  }
}

TEST(Planner, SettlesOnSinglesWhereTwoSamplesDoNotFit) {
  Planner planner;
  const Request small = request(64, 5000);
  planner.begin(small);
  ASSERT_EQ(planner.next()->plan.micro_batch_size(), 2);
  planner.ran_out_of_memory(6000);
  Measurement measured;
  measured.peak_bytes = 4900;
  for (int step = 0; step < 3; ++step) {
    planner.begin(small);
    while (const auto piece = planner.next()) {
      EXPECT_EQ(piece->plan.micro_batch_size(), 1);
      EXPECT_EQ(piece->settled, step == 2);
      planner.observe(*piece, measured);
    }
    EXPECT_TRUE(planner.settled());
  }
  EXPECT_EQ(planner.plan().predicted_peak_bytes, 4900);
}

/// A single sample takes other kernels, with more workspace: memory does not grow with the size.
constexpr int64_t kSingle = 3000;

TEST(Planner, SaysTheSmallestBudgetOnceMemoryIsKnown) {
  for (const int64_t single : {int64_t{0}, kSingle}) {
    Planner planner;
    Machine machine;
    machine.single = single;
    for (int i = 0; i < 3; ++i) run(planner, machine, request(64, 20000));
    Request later = request(64, 20000);
    later.baseline_bytes = 15000;  // the optimizer's state has arrived
    try {
      run(planner, machine, later);
      FAIL() << "expected BudgetExceeded";
    } catch (const BudgetExceeded& error) {
      // Nobody has seen what one sample takes.
      EXPECT_EQ(error.smallest_feasible(), 15000 + Machine::peak_above(2, /*later=*/true));
      Request enough = later;
      enough.budget_bytes = error.smallest_feasible().value_or(0);
      EXPECT_NO_THROW(run(planner, machine, enough));
    }
  }
}

TEST(Planner, ASplitThatHasFitIsNotRefusedByWhatAnotherOneTook) {
  for (const bool accelerator : {false, true}) {
    Planner planner;
    Machine machine;
    machine.single = kSingle;
    const int64_t budget = kBaseline + Machine::peak_above(2, /*later=*/true);
    Request many = request(48, budget);
    Request fewer = request(37, budget);  // the last micro-batch is of one sample
    many.measured = fewer.measured = accelerator;
    fewer.baseline_bytes -= kSingle;
    Request wide = many;  // enough to see what sizes take
    wide.budget_bytes += 4000;
    for (int i = 0; i < 5; ++i) run(planner, machine, wide);
    run(planner, machine, many);
    run(planner, machine, fewer);
    const Step step = run(planner, machine, many);
    EXPECT_EQ(sum(step.sizes), 48);
    EXPECT_EQ(step.restarts, 0);
    EXPECT_EQ(planner.plan().predicted_peak_bytes, budget);
  }
}

TEST(Planner, OnlyWhatHasFailedIsRefused) {
  Machine machine;
  machine.single = kSingle;
  const int64_t budget = kBaseline + Machine::peak_above(2, /*later=*/true);
  Planner planner;
  for (int i = 0; i < 5; ++i) run(planner, machine, request(37, budget + kSingle));
  // Never seen whole, and foreseen as too large by what 37 took beyond their prediction.
  Step step = run(planner, machine, request(40, budget));
  EXPECT_EQ(step.sizes, std::vector<int64_t>(20, 2));
  // Somebody else holds memory for a while: one sample does not fit afterwards either, two do.
  Request held = request(40, budget);
  held.budget_bytes -= 1;
  EXPECT_THROW(run(planner, machine, held), BudgetExceeded);
  step = run(planner, machine, request(40, budget));
  EXPECT_EQ(step.sizes, std::vector<int64_t>(20, 2));
}

}  // namespace
}  // namespace infinitybatch::testing
