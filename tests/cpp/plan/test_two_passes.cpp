// The planner where forward runs twice unless its graph is kept.
#include "plan/planner_machine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
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

  /// Larger ones are a bit faster.
  static double seconds_per_sample(int64_t size) {
    return 1e-3 + 2e-5 * std::log2(double(kSamples) / double(size));
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
  static void settle(Planner& planner, int64_t graphs) {
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
      planner.saw_whole_loss(planner.two_pass().plan, {});
    }
    EXPECT_TRUE(planner.settled());
  }

  static Plan plan(int64_t graphs) {
    Planner planner;
    settle(planner, graphs);
    EXPECT_EQ(planner.plan().micro_batch_size(), planner.two_pass().plan.micro_batch_size());
    return planner.plan();
  }
};

TEST(Planner, WeighsTheGraphsThatFitAgainstFasterSizesThatKeepFewer) {
  constexpr int64_t kSamples = TwoPassMachine::kSamples;
  for (const int64_t graphs : {5, 12, 20, 33, 40, 44, 50, 56, 63, 64}) {
    const Plan plan = TwoPassMachine::plan(graphs);
    // The graphs kept lie beside the one whose forward runs, and go one by one: all that fits.
    double best = INFINITY;
    for (int64_t size = 2; size <= std::min(graphs, kSamples); size *= 2) {
      const double kept = double(graphs / size * size) / double(kSamples);
      const double seconds =
          TwoPassMachine::seconds_per_sample(size) - kept * TwoPassMachine::kAgain;
      best = std::min(best, seconds * double(kSamples));
    }
    ASSERT_TRUE(plan.predicted_seconds.has_value());
    EXPECT_LE(*plan.predicted_seconds, 1.0001 * best) << graphs << '\n' << plan.explain();
    EXPECT_LE(plan.retained * plan.micro_batch_size(), std::max(graphs, plan.micro_batch_size()));
  }
  // Of the fastest that fits, half of the batch, one graph is kept; of eight at a time five are.
  EXPECT_EQ(TwoPassMachine::plan(40).micro_batch_size(), 8);
  EXPECT_EQ(TwoPassMachine::plan(40).retained, 5);
  EXPECT_EQ(TwoPassMachine::plan(64).micro_batch_size(), kSamples);
}

TEST(Planner, KnowsWhereThereIsNothingToRehearse) {
  Planner planner;
  EXPECT_FALSE(planner.settled_for(TwoPassMachine::request(40)));
  TwoPassMachine::settle(planner, 40);
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
  TwoPassMachine::settle(planner, 40);
  EXPECT_TRUE(planner.settled_for(again));
  planner.ran_out_of_memory(1 << 20);
  EXPECT_FALSE(planner.settled_for(again));
}

}  // namespace
}  // namespace infinitybatch::testing
