// The planner where samples are of unequal length, against a machine whose memory and time are
// known formulas of size and length.
#include "plan/planner.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace infinitybatch::of_lengths {
namespace {

constexpr int64_t kBaseline = 1000;
constexpr int64_t kGradient = 400;

/// A sample of `length` needs 10 bytes for each step of it while its micro-batch runs.
struct Machine {
  std::function<int64_t(int64_t begin, int64_t end)> length;  // of the samples of these rows
  double fixed_seconds = 0;                                   // of a micro-batch
  int traces = 0;

  static MicroBatchTrace trace(int64_t size, int64_t length, bool first) {
    static const char memory[4] = {};
    const auto at = [&](int i) { return static_cast<const void*>(memory + i); };
    MicroBatchTrace trace;
    trace.size = size;
    const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
    starts();  // load
    starts();  // forward
    trace.events.push_back({at(0), 10 * length * size});
    starts();  // loss
    starts();  // backward
    trace.events.push_back({at(2), kGradient});
    trace.sinks.push_back({trace.events.size(), {at(2), first ? at(2) : at(3), kGradient}});
    if (!first) trace.events.push_back({at(2), -kGradient});
    trace.events.push_back({at(0), -10 * length * size});
    starts();  // free
    return trace;
  }
};

struct Step {
  std::vector<int64_t> sizes;
  int64_t peak = 0;
  int restarts = 0;
};

Step run(Planner& planner, Machine& machine, const Request& request, bool ragged = false) {
  Step step;
  planner.begin(request);
  int64_t row = 0;
  while (const auto piece = planner.next()) {
    Measurement measured;
    measured.peak_bytes = kBaseline;
    std::vector<int64_t> lengths;
    for (const int64_t size : piece->plan.micro_batch_sizes) {
      const bool begun = row > 0;
      const int64_t length = machine.length(row, row + size);
      lengths.push_back(length);
      measured.peak_bytes = std::max(measured.peak_bytes,
                                     kBaseline + 10 * length * size + kGradient * (begun ? 2 : 1));
      measured.seconds.push_back(machine.fixed_seconds + 1e-4 * static_cast<double>(size * length));
      if (ragged) measured.dims.push_back({{length}});
      if (piece->trace) {
        measured.trace = Machine::trace(size, length, !begun);
        ++machine.traces;
      }
      row += size;
    }
    if (measured.peak_bytes > request.budget_bytes) {
      ++step.restarts;
      planner.ran_out_of_memory(measured.peak_bytes);
      planner.begin(request);
      step.sizes.clear();
      step.peak = 0;
      row = 0;
      continue;
    }
    step.peak = std::max(step.peak, measured.peak_bytes);
    step.sizes.insert(step.sizes.end(), piece->plan.micro_batch_sizes.begin(),
                      piece->plan.micro_batch_sizes.end());
    planner.observe(*piece, measured);
  }
  EXPECT_EQ(std::accumulate(step.sizes.begin(), step.sizes.end(), int64_t{0}), request.batch_size);
  EXPECT_LE(step.peak, request.budget_bytes);
  return step;
}

Request request(int64_t length, int64_t samples = 200, int64_t budget = 100'000) {
  Request request;
  request.signature = "tokens";
  request.dims = {{length}};
  request.batch_size = samples;
  request.baseline_bytes = kBaseline;
  request.budget_bytes = budget;
  return request;
}

Machine of_length(const int64_t& length) {
  return {[&length](int64_t, int64_t) { return length; }};
}

TEST(Lengths, ShorterSamplesFollowTheLongerOnesPlanWithoutProbes) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length));
  ASSERT_TRUE(planner.settled());
  const int probes = machine.traces;
  EXPECT_EQ(probes, 2);
  for (const int64_t shorter : {99, 70, 98, 100, 85}) {
    length = shorter;
    const Step step = run(planner, machine, request(length));
    EXPECT_EQ(step.restarts, 0);
    ASSERT_TRUE(planner.plan().predicted_peak_bytes);
    EXPECT_GE(*planner.plan().predicted_peak_bytes, step.peak) << "a bound";
  }
  EXPECT_EQ(machine.traces, probes);
}

TEST(Lengths, LongerSamplesAreTracedOnceAndThenPredicted) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  run(planner, machine, request(length));
  length = 150;
  const Step step = run(planner, machine, request(length));
  EXPECT_EQ(machine.traces, 3);
  EXPECT_LE(step.sizes[0], 2) << "until it is known what they take";
  for (const int64_t other : {100, 150, 170, 120, 101}) {
    length = other;
    EXPECT_EQ(run(planner, machine, request(length)).restarts, 0) << other;
  }
  EXPECT_LE(machine.traces, 4);
}

TEST(Lengths, AStreamOfEverNewLengthsNeedsNoProbeEach) {
  Planner planner;
  int64_t length = 0;
  Machine machine = of_length(length);
  machine.fixed_seconds = 1e-3;
  int restarts = 0;
  int64_t last_traces = 0;
  for (int i = 0; i < 60; ++i) {
    length = 40 + (37 * i) % 101;
    Request asked = request(length);
    asked.dims = {{length}, {length + 1}, {7}};  // ids, labels with one more, and what is fixed
    const Step step = run(planner, machine, asked);
    if (i > 20) restarts += step.restarts;
    if (i == 20) last_traces = machine.traces;
  }
  EXPECT_EQ(restarts, 0);
  EXPECT_LE(machine.traces, 7);
  EXPECT_EQ(machine.traces, last_traces);
  ASSERT_TRUE(planner.settled());
  EXPECT_TRUE(planner.plan().predicted_peak_bytes);
}

TEST(Lengths, NeitherLongerNorShorterIsProbed) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  Request wide = request(length);
  wide.dims = {{100}, {10}};
  run(planner, machine, wide);
  Request high = request(length);
  high.dims = {{10}, {100}};
  run(planner, machine, high);
  EXPECT_EQ(machine.traces, 4);
  Request below_both = request(length);
  below_both.dims = {{10}, {10}};
  run(planner, machine, below_both);
  EXPECT_EQ(machine.traces, 4);
}

TEST(Lengths, WhatComesBackOftenAndCouldGainGetsItsOwnPlan) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  machine.fixed_seconds = 1e-2;  // larger micro-batches are faster
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length));
  const int64_t under_longer = planner.plan().micro_batch_size();
  EXPECT_EQ(machine.traces, 2);

  length = 50;
  for (int i = 0; i < 3; ++i) {
    const Step step = run(planner, machine, request(length));
    EXPECT_EQ(*std::max_element(step.sizes.begin(), step.sizes.end()), under_longer);
    EXPECT_EQ(machine.traces, 2) << "step " << i;
  }
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length));
  EXPECT_EQ(machine.traces, 3) << "one tells what a length takes";
  EXPECT_GE(planner.plan().micro_batch_size(), 3 * under_longer / 2);
}

TEST(Lengths, WhatCannotGainNeverGetsItsOwnPlan) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  machine.fixed_seconds = 1e-2;
  // The whole batch fits at once.
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length, 50));
  length = 40;
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length, 50));
  EXPECT_EQ(machine.traces, 2);
}

TEST(Lengths, ShorterSamplesFitWhereLongerOnesDoNot) {
  Planner planner;
  int64_t length = 1000;
  Machine machine = of_length(length);
  run(planner, machine, request(length, 200, 100'000));
  const int64_t tight = kBaseline + 2 * kGradient + 5'000;
  EXPECT_THROW(run(planner, machine, request(length, 200, tight)), BudgetExceeded);
  length = 100;
  run(planner, machine, request(length, 200, tight));
}

TEST(Lengths, WhatNeedsMoreThoughItIsShorterIsMeasuredByItself) {
  Planner planner;
  int64_t length = 100;
  Machine machine = of_length(length);
  machine.fixed_seconds = 1e-2;
  for (int i = 0; i < 12; ++i) run(planner, machine, request(length));
  length = 160;  // the machine's; the planner is told 90
  EXPECT_GT(run(planner, machine, request(90)).restarts, 0);
  for (int i = 0; i < 12; ++i) run(planner, machine, request(90));
  EXPECT_EQ(run(planner, machine, request(90)).restarts, 0);
  EXPECT_EQ(machine.traces, 3);
}

TEST(Lengths, RaggedBatchesArePlannedByTheLongestSamples) {
  Planner planner;
  // Padded to the longest of a micro-batch; the longest sample of all is the last.
  Machine machine{[](int64_t, int64_t end) { return end == 200 ? 90 : 10 + end % 40; }};
  Request source = request(10);
  source.dims = {};  // told by what was loaded
  run(planner, machine, source, /*ragged=*/true);
  EXPECT_NE(planner.plan().reason.find("unequal length"), std::string::npos)
      << planner.plan().reason;
  for (int i = 0; i < 12; ++i) {
    const Step step = run(planner, machine, source, /*ragged=*/true);
    EXPECT_EQ(step.restarts, 0) << "all rows were seen in the first step";
  }
  EXPECT_LE(machine.traces, 3);
}

}  // namespace
}  // namespace infinitybatch::of_lengths
