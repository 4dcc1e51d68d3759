// The planner where rows are sorted by length, against a machine whose memory and time are known
// formulas of rows and length.
#include "plan/packing.hpp"
#include "plan/planner.hpp"
#include "plan/probes.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace infinitybatch::of_packing {
namespace {

constexpr int64_t kBaseline = 10'000;
constexpr int64_t kGradient = 4'000;

/// What a micro-batch's forward makes, which its backward frees: tokens, attention's scores, and a
/// mask that is there once.
struct Machine {
  int64_t tokens = 40;
  int64_t scores = 2;
  int64_t mask = 1;
  /// What a kernel rounds lengths up to in the scores; 1: nothing.
  int64_t rounding = 1;
  double fixed_seconds = 1e-3;
  int traces = 0;
  int forwards = 0;

  std::vector<int64_t> blocks(int64_t rows, int64_t length) const {
    const int64_t rounded = (length + rounding - 1) / rounding * rounding;
    return {tokens * rows * length, scores * rows * rounded * rounded, mask * length * length, 640};
  }
  int64_t activations(int64_t rows, int64_t length) const {
    const std::vector<int64_t> all = blocks(rows, length);
    return std::accumulate(all.begin(), all.end(), int64_t{0});
  }
  MicroBatchTrace trace(int64_t rows, int64_t length, bool first) const {
    static const char memory[8] = {};
    const auto at = [&](size_t i) { return static_cast<const void*>(memory + i); };
    MicroBatchTrace trace;
    trace.size = rows;
    const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
    const std::vector<int64_t> made = blocks(rows, length);
    starts();  // load
    starts();  // forward
    for (size_t i = 0; i < made.size(); ++i) trace.events.push_back({at(i), made[i]});
    starts();  // loss
    starts();  // backward
    trace.events.push_back({at(5), kGradient});
    trace.sinks.push_back({trace.events.size(), {at(5), first ? at(5) : at(6), kGradient}});
    if (!first) trace.events.push_back({at(5), -kGradient});
    for (size_t i = 0; i < made.size(); ++i) trace.events.push_back({at(i), -made[i]});
    starts();  // free
    return trace;
  }
};

struct Step {
  std::vector<int64_t> sizes;
  std::vector<int64_t> lengths;
  int64_t peak = 0;
  int64_t predicted = 0;
  int restarts = 0;
};

Request request(std::vector<int64_t> lengths, int64_t budget) {
  std::sort(lengths.rbegin(), lengths.rend());
  Request request;
  request.signature = "tokens";
  request.dims = {{0}};
  request.batch_size = std::ssize(lengths);
  request.lengths = std::move(lengths);
  request.baseline_bytes = kBaseline;
  request.budget_bytes = budget;
  return request;
}

Step run(Planner& planner, Machine& machine, const Request& request) {
  Step step;
  planner.begin(request);
  int64_t row = 0;
  while (const auto piece = planner.next()) {
    EXPECT_EQ(piece->first_row, row) << "all rows of a stream run";
    Measurement measured;
    measured.peak_bytes = kBaseline;
    std::vector<int64_t> lengths;
    const auto& sizes = piece->plan.micro_batch_sizes;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t length =
          std::max(request.lengths[static_cast<size_t>(row)], piece->least_length);
      EXPECT_EQ(piece->plan.lengths[i], length);
      lengths.push_back(length);
      const int64_t activations = machine.activations(sizes[i], length);
      measured.peak_bytes =
          std::max(measured.peak_bytes, kBaseline + activations + kGradient * (row > 0 ? 2 : 1));
      measured.seconds.push_back(machine.fixed_seconds + 1e-8 * static_cast<double>(activations));
      if (piece->trace) {
        measured.trace = machine.trace(sizes[i], length, row == 0);
        ++machine.traces;
      }
      row += sizes[i];
    }
    ++machine.forwards;
    if (measured.peak_bytes > request.budget_bytes) {
      ++step.restarts;
      planner.ran_out_of_memory(measured.peak_bytes);
      planner.begin(request);
      const int restarts = step.restarts;
      step = {};
      step.restarts = restarts;
      row = 0;
      continue;
    }
    step.peak = std::max(step.peak, measured.peak_bytes);
    step.predicted = piece->plan.predicted_peak_bytes.value_or(0);
    step.sizes.insert(step.sizes.end(), sizes.begin(), sizes.end());
    step.lengths.insert(step.lengths.end(), lengths.begin(), lengths.end());
    planner.observe(*piece, measured);
  }
  EXPECT_EQ(std::accumulate(step.sizes.begin(), step.sizes.end(), int64_t{0}), request.batch_size);
  EXPECT_LE(step.peak, request.budget_bytes);
  return step;
}

std::vector<int64_t> log_normal(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> distribution(3.2, .75);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    const auto drawn = static_cast<int64_t>(distribution(random));
    lengths.push_back(std::clamp<int64_t>(drawn, 2, 300));
  }
  return lengths;
}

std::vector<int64_t> bimodal(int64_t count, int64_t few, int64_t many) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(i % 2 == 0 ? few : many);
  return lengths;
}

TEST(Packing, RowsArePackedUnevenlyToTheBudget) {
  Planner planner;
  Machine machine;
  machine.fixed_seconds = 1e-2;  // the larger the faster
  const Request asked = request(log_normal(256, 1), 600'000);
  Step step;
  for (int i = 0; i < 12; ++i) step = run(planner, machine, asked);
  EXPECT_TRUE(planner.settled()) << planner.plan().reason;
  EXPECT_EQ(step.restarts, 0);
  EXPECT_LT(step.sizes.front(), step.sizes.back() + step.sizes[step.sizes.size() - 2]);
  EXPECT_LE(machine.traces, 7);
  // Each is as full as it can be, but for rounding and the last.
  for (size_t i = 0; i + 1 < step.sizes.size(); ++i) {
    const int64_t room = asked.budget_bytes - kBaseline - 2 * kGradient;
    EXPECT_GE(static_cast<double>(machine.activations(step.sizes[i] + 2, step.lengths[i])),
              .93 * static_cast<double>(room))
        << step.sizes[i] << " rows of " << step.lengths[i];
  }
}

TEST(Packing, AStepThatTookMuchMoreThanPredictedHasAPlanWithoutCandidates) {
  Planner planner;
  Machine machine;
  const Request asked = request(log_normal(256, 1), 600'000);
  for (int i = 0; i < 12; ++i) run(planner, machine, asked);
  planner.begin(asked);
  const auto piece = planner.next();
  ASSERT_TRUE(piece && piece->settled);
  Measurement measured;
  measured.peak_bytes = 1000 * asked.budget_bytes;
  planner.observe(*piece, measured);
  EXPECT_TRUE(planner.plan().candidates.empty());
  EXPECT_FALSE(planner.plan().reason.empty());
}

TEST(Packing, APeakThatIsOffByMoreThanAPercentHasItsLengthTracedAgain) {
  Planner planner;
  Machine machine;
  const Request asked = request(log_normal(256, 1), 600'000);
  for (int i = 0; i < 12; ++i) run(planner, machine, asked);
  for (const double share : {.995, .97}) {
    planner.begin(asked);
    const auto piece = planner.next();
    ASSERT_TRUE(piece && piece->settled);
    const auto above = static_cast<double>(*piece->plan.predicted_peak_bytes - kBaseline);
    Measurement measured;
    measured.peak_bytes = kBaseline + static_cast<int64_t>(share * above);
    planner.observe(*piece, measured);
    EXPECT_EQ(planner.settled(), share > .99);
  }
  const int traces = machine.traces;
  run(planner, machine, asked);
  EXPECT_EQ(machine.traces, traces + 1);
}

TEST(Packing, WhatRunsOutOfMemoryByLittleIsPackedByLittleLess) {
  Planner planner;
  Machine machine;
  machine.fixed_seconds = 1e-2;  // the larger the faster
  const Request asked = request(log_normal(256, 1), 600'000);
  Step step;
  for (int i = 0; i < 12; ++i) step = run(planner, machine, asked);
  planner.begin(asked);
  ASSERT_TRUE(planner.next());
  planner.ran_out_of_memory(asked.budget_bytes + asked.budget_bytes / 50);
  Step later;
  for (int i = 0; i < 12; ++i) later = run(planner, machine, asked);
  EXPECT_LE(std::ssize(later.sizes), std::ssize(step.sizes) * 5 / 4);
}

TEST(Packing, PredictionsAreExactOnceThreeLengthsAreKnown) {
  Planner planner;
  Machine machine;
  for (int i = 0; i < 12; ++i) run(planner, machine, request(log_normal(256, 1), 600'000));
  const int traces = machine.traces;
  int unpredicted = 0;
  for (uint32_t seed = 2; seed < 30; ++seed) {
    const Step step = run(planner, machine, request(log_normal(200 + seed, seed), 600'000));
    EXPECT_EQ(step.restarts, 0);
    if (step.predicted == 0) {
      ++unpredicted;
    } else {
      EXPECT_EQ(step.predicted, step.peak) << seed;
    }
  }
  EXPECT_LE(unpredicted, 3);
  EXPECT_LE(machine.traces, traces + 2) << "far longer or shorter rows may be traced";
}

TEST(Packing, AStreamOfNewLengthsNeedsNoProbeEach) {
  Planner planner;
  Machine machine;
  for (const int64_t length : {100, 40, 90, 17, 101, 33, 64, 71, 99, 12, 55, 47, 83, 21}) {
    const Step step = run(planner, machine, request(std::vector<int64_t>(64, length), 400'000));
    EXPECT_EQ(step.restarts, 0) << length;
  }
  EXPECT_LE(machine.traces, 5);
  // Nor do lengths beyond those that were seen, at once.
  const Step step = run(planner, machine, request(std::vector<int64_t>(64, 120), 400'000));
  EXPECT_EQ(step.restarts, 0);
}

TEST(Packing, BimodalAndEqualLengths) {
  for (const auto& lengths :
       {bimodal(200, 200, 20), bimodal(200, 200, 199), std::vector<int64_t>(200, 80)}) {
    Planner planner;
    Machine machine;
    machine.fixed_seconds = 1e-2;
    Step step;
    for (int i = 0; i < 14; ++i) step = run(planner, machine, request(lengths, 900'000));
    EXPECT_TRUE(planner.settled());
    EXPECT_EQ(step.restarts, 0);
    EXPECT_LE(machine.traces, 5);
    if (lengths[0] > 2 * lengths[1]) {
      EXPECT_GT(step.sizes.back() + step.sizes[step.sizes.size() - 2], 2 * step.sizes.front());
    }
  }
}

TEST(Packing, ShorterRowsGoToTheNextMicroBatchWhereItHasRoom) {
  Planner planner;
  Machine machine;
  machine.fixed_seconds = 1e-2;
  std::vector<int64_t> lengths(48, 200);
  lengths.resize(256, 20);
  Step step;
  for (int i = 0; i < 14; ++i) step = run(planner, machine, request(lengths, 900'000));
  EXPECT_TRUE(planner.settled());
  int64_t computed = 0;
  for (size_t i = 0; i < step.sizes.size(); ++i) computed += step.sizes[i] * step.lengths[i];
  EXPECT_EQ(computed, 48 * 200 + 208 * 20) << "long rows have none that are padded beside them";
}

TEST(Packing, StepsOfAKernelAreMeasuredWhereTheyWereWrong) {
  Planner planner;
  Machine machine;
  machine.rounding = 16;
  machine.fixed_seconds = 1e-2;
  int restarts = 0;
  for (uint32_t seed = 1; seed < 60; ++seed) {
    const Step step = run(planner, machine, request(log_normal(256, seed), 900'000));
    if (seed > 30) restarts += step.restarts;
  }
  EXPECT_EQ(restarts, 0);
  EXPECT_LE(machine.traces, 24);
}

TEST(Packing, OneRowThatNeedsMoreThanThereIsIsRefused) {
  Planner planner;
  Machine machine;
  std::vector<int64_t> lengths = log_normal(100, 3);
  for (int i = 0; i < 6; ++i) run(planner, machine, request(lengths, 400'000));
  lengths[0] = 2000;
  EXPECT_THROW(run(planner, machine, request(lengths, 400'000)), BudgetExceeded);
  EXPECT_EQ(run(planner, machine, request(log_normal(100, 4), 400'000)).restarts, 0);
}

/// Some rows are given a position more. Where that is as long as what did not fit, the step began
/// again and again with the same.
TEST(Packing, APositionMoreIsNotTriedWhereItIsTooLong) {
  const Machine machine;
  Request asked = request({12, 12, 11, 11, 9, 9, 9, 6, 6, 6, 6, 6}, 400'000);
  plan::Learned learned;
  for (const int64_t rows : {2, 4, 2}) {
    MicroBatchTrace trace = machine.trace(rows, 6, learned.traces.empty());
    trace.length = 6;
    if (!learned.profile) learned.learn(std::move(trace), asked);
  }
  ASSERT_TRUE(learned.profile);
  asked.packing = std::make_shared<plan::Packing>(asked, *learned.profile);
  learned.other_stories = 1;
  learned.wanted_length = 9;
  learned.too_long = 11;
  const auto found = plan::length_to_learn(asked, learned, /*row=*/0);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->length, 10);
  learned.too_long = 10;
  EXPECT_FALSE(plan::length_to_learn(asked, learned, /*row=*/0));
}

TEST(Packing, TheFastestSizeNeedNotBeTheLargest) {
  Planner planner;
  Machine machine;
  machine.fixed_seconds = 0;
  const Request asked = request(log_normal(512, 5), 4'000'000);
  for (int i = 0; i < 6; ++i) run(planner, machine, asked);
  const Plan plan = planner.plan();
  EXPECT_NE(plan.reason.find("packed"), std::string::npos) << plan.reason;
  EXPECT_FALSE(plan.candidates.empty());
}

}  // namespace
}  // namespace infinitybatch::of_packing
