#pragma once

#include "plan/planner.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

// A simulated machine whose memory and time are known formulas, and steps of a planner on it.
namespace infinitybatch::testing {

inline constexpr int64_t kBaseline = 1000;

/// One micro-batch allocates activations of 100 bytes a sample, then a fixed workspace of 5000
/// bytes and a gradient of 400 bytes: its peak is no straight line through two sizes' peaks.
struct Machine {
  std::function<double(int64_t)> seconds_per_sample = [](int64_t) { return 1e-3; };
  double noise = 0;  // relative
  double preempted =
      0;            // chance that other programs take 5 to 50 ms in the middle of 10 ms of work
  double cold = 0;  // seconds that the first micro-batch after another size takes longer
  double sums = 0;  // seconds that each micro-batch behind the first of a step takes longer
  int64_t last_size = 0;
  int64_t single = 0;  // bytes that a micro-batch of one sample takes more
  bool irregular = false;
  std::mt19937 random{0};

  MicroBatchTrace trace(int64_t size, bool first) {
    static const char memory[8] = {};
    MicroBatchTrace trace;
    trace.size = size;
    const auto at = [&](int i) { return static_cast<const void*>(memory + i); };
    const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
    starts();  // load
    starts();  // forward
    trace.events.push_back({at(0), 100 * size});
    starts();  // loss
    if (irregular && size > 2) {
      trace.events.push_back({at(3), 7});
      trace.events.push_back({at(3), -7});
    }
    starts();  // backward
    trace.events.push_back({at(1), 5000});
    trace.events.push_back({at(2), 400});
    trace.sinks.push_back({trace.events.size(), {at(2), first ? at(2) : at(4), 400}});
    if (!first) trace.events.push_back({at(2), -400});
    trace.events.push_back({at(1), -5000});
    trace.events.push_back({at(0), -100 * size});
    starts();  // free
    return trace;
  }

  static int64_t peak_above(int64_t largest, bool later) {
    return 100 * largest + 5000 + 400 + (later ? 400 : 0);
  }

  /// Seconds of one micro-batch.
  double time(int64_t size) {
    std::normal_distribution<double> normal(0, noise);
    std::uniform_real_distribution<double> uniform;
    double work = seconds_per_sample(size) * double(size) * (1 + std::abs(normal(random)));
    if (size != last_size) work += cold;
    last_size = size;
    double wall = work;
    for (double left = work; left > 0; left -= 0.01) {
      const double chance = preempted * std::min(1.0, left / 0.01);
      if (uniform(random) < chance) wall += 0.005 + 0.045 * uniform(random);
    }
    return wall;
  }
};

struct Step {
  std::vector<int64_t> sizes;
  int64_t peak = 0;
  int restarts = 0;
};

/// Runs one step of `planner` on `machine`, as the executor would: what passes the budget runs out
/// of memory, and the step begins again.
inline Step run(Planner& planner, Machine& machine, Request request) {
  Step step;
  planner.begin(request);
  while (const auto piece = planner.next()) {
    const auto& sizes = piece->plan.micro_batch_sizes;
    const bool begun = !step.sizes.empty();
    int64_t above = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t more = sizes[i] == 1 ? machine.single : 0;
      above = std::max(above, Machine::peak_above(sizes[i], begun || i > 0) + more);
    }
    Measurement measured;
    measured.peak_bytes = request.baseline_bytes + above;
    if (measured.peak_bytes > request.budget_bytes) {
      planner.ran_out_of_memory(measured.peak_bytes);
      planner.begin(request);
      const int restarts = step.restarts + 1;
      step = {};
      step.restarts = restarts;
      continue;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      const double sums = begun || i > 0 ? machine.sums : 0;
      measured.seconds.push_back(machine.time(sizes[i]) + sums);
    }
    if (piece->trace) measured.trace = machine.trace(sizes.front(), !begun);
    step.peak = std::max(step.peak, measured.peak_bytes);
    step.sizes.insert(step.sizes.end(), sizes.begin(), sizes.end());
    planner.observe(*piece, measured);
  }
  return step;
}

inline Request request(int64_t samples, int64_t budget) {
  Request request;
  request.signature = "sample";
  request.batch_size = samples;
  request.baseline_bytes = kBaseline;
  request.budget_bytes = budget;
  return request;
}

inline int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

}  // namespace infinitybatch::testing
