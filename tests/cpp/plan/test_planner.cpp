// The planner against a simulated machine whose memory and time are known formulas.
#include "execute/schedule.hpp"
#include "plan/planner.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace infinitybatch {
namespace {

constexpr int64_t kBaseline = 1000;

/// One micro-batch allocates activations of 100 bytes a sample, then a fixed workspace of 5000
/// bytes and a gradient of 400 bytes: its peak is no straight line through two sizes' peaks.
struct Machine {
  std::function<double(int64_t)> seconds_per_sample = [](int64_t) { return 1e-3; };
  double noise = 0;  // relative
  double preempted =
      0;            // chance that other programs take 5 to 50 ms in the middle of 10 ms of work
  double cold = 0;  // seconds that the first micro-batch after another size takes longer
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
Step run(Planner& planner, Machine& machine, Request request) {
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
    for (const int64_t size : sizes) measured.seconds.push_back(machine.time(size));
    if (piece->trace) measured.trace = machine.trace(sizes.front(), !begun);
    step.peak = std::max(step.peak, measured.peak_bytes);
    step.sizes.insert(step.sizes.end(), sizes.begin(), sizes.end());
    planner.observe(*piece, measured);
  }
  return step;
}

Request request(int64_t samples, int64_t budget) {
  Request request;
  request.signature = "sample";
  request.batch_size = samples;
  request.baseline_bytes = kBaseline;
  request.budget_bytes = budget;
  return request;
}

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

TEST(Planner, FirstStepProbesTwoAndFourAndKeepsEveryRow) {
  Planner planner;
  Machine machine;
  const Step step = run(planner, machine, request(100, 1 << 20));
  EXPECT_EQ(sum(step.sizes), 100);
  EXPECT_EQ(step.sizes[0], 2);
  EXPECT_EQ(step.sizes[1], 4);
}

TEST(Planner, NeverPlansAboveTheBudgetAndPredictsItsPeakExactly) {
  for (const int64_t budget : {7100, 8000, 9999, 20000, 100000, 1000000}) {
    Planner planner;
    Machine machine;
    for (int i = 0; i < 20; ++i) {
      const Step step = run(planner, machine, request(1000, budget));
      EXPECT_EQ(sum(step.sizes), 1000);
      EXPECT_LE(step.peak, budget);
    }
    ASSERT_TRUE(planner.settled()) << budget;
    const Step step = run(planner, machine, request(1000, budget));
    EXPECT_EQ(planner.plan().predicted_peak_bytes, step.peak) << budget;
  }
}

TEST(Planner, FindsTheLargestSizeWhereLargerIsFaster) {
  Planner planner;
  Machine machine;
  machine.seconds_per_sample = [](int64_t size) { return 1e-3 / double(size); };
  // Above the baseline 400 stay, 400 come and go, 5000 are workspace: 100 bytes a sample are left
  // for 123 samples.
  const int64_t budget = kBaseline + 5800 + 12345;
  for (int i = 0; i < 12; ++i) run(planner, machine, request(100000, budget));
  EXPECT_EQ(planner.plan().micro_batch_size(), 123);
}

TEST(Planner, ChoosesWithinFivePercentOfTheFastestFeasibleSize) {
  const std::vector<std::function<double(int64_t)>> machines{
      [](int64_t n) { return 1e-3 + 1e-2 / double(n); },  // fixed cost
      [](int64_t n) {
        return 1e-3 + 1e-2 / double(n) + 1e-5 * double(n);
      },                                               // and caches that overflow
      [](int64_t n) { return n < 16 ? 2e-3 : 1e-3; },  // a step
      [](int64_t) { return 1e-3; },
  };
  for (size_t m = 0; m < machines.size(); ++m) {
    for (const double noise : {0.0, 0.02}) {
      Planner planner;
      Machine machine;
      machine.seconds_per_sample = machines[m];
      machine.noise = noise;
      constexpr int64_t kBudget = 200000;
      for (int i = 0; i < 20; ++i) run(planner, machine, request(4096, kBudget));
      double fastest = INFINITY;
      for (int64_t n = 1; Machine::peak_above(n, true) + kBaseline <= kBudget; ++n) {
        fastest = std::min(fastest, machines[m](n));
      }
      const int64_t chosen = planner.plan().micro_batch_size();
      EXPECT_LE(machines[m](chosen), 1.05 * fastest) << "machine " << m << " chose " << chosen;
      EXPECT_TRUE(planner.settled());
    }
  }
}

TEST(Planner, SplitsABatchThatFitsOnlyWhereThatIsWorthIt) {
  constexpr int64_t kSamples = 512;
  const auto chosen = [](double whole) {  // relative to half of it, which is the fastest
    Planner planner;
    Machine machine;
    machine.seconds_per_sample = [whole](int64_t n) {
      return n == kSamples ? whole * 1e-3 : 1e-3 + 1e-4 * std::abs(std::log2(double(n) / 256));
    };
    for (int i = 0; i < 40; ++i) run(planner, machine, request(kSamples, 1 << 20));
    EXPECT_TRUE(planner.settled());
    const std::string text = planner.plan().explain();
    const bool says =
        text.find("the whole batch fits, and splitting it saves less than 3 %") < text.size();
    EXPECT_EQ(says, planner.plan().micro_batch_size() == kSamples) << text;
    return planner.plan().micro_batch_size();
  };
  EXPECT_EQ(chosen(0.99), kSamples);
  EXPECT_EQ(chosen(1.02), kSamples);
  EXPECT_EQ(chosen(1.04), kSamples / 2);
}

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

/// On a machine that others use as well, and where a first micro-batch of a size is slow.
TEST(Planner, ChoosesWithinFivePercentUnderPreemption) {
  struct Case {
    std::function<double(int64_t)> seconds_per_sample;
    int64_t samples;
  };
  const std::vector<Case> cases{
      {[](int64_t n) { return 2e-5 + 1e-3 / double(n); }, 256},  // a step takes few ms
      {[](int64_t n) { return 2e-5 + 1e-3 / double(n) + 5e-8 * double(n); }, 4096},
      {[](int64_t n) { return 2e-4 + 5e-3 / double(n) + 1e-6 * double(n); }, 2000},
      {[](int64_t n) { return n < 16   ? 2e-3
                              : n < 64 ? 1e-3
                                       : 1.3e-3; }, 1000},  // half a second
  };
  for (size_t c = 0; c < cases.size(); ++c) {
    const auto& seconds = cases[c].seconds_per_sample;
    constexpr int64_t kBudget = 60000;
    double fastest = INFINITY;
    for (int64_t n = 1; n <= cases[c].samples; ++n) {
      if (Machine::peak_above(n, true) + kBaseline <= kBudget) {
        fastest = std::min(fastest, seconds(n));
      }
    }
    int wrong = 0;
    int most_steps = 0;
    for (unsigned seed = 0; seed < 100; ++seed) {
      Planner planner;
      Machine machine;
      machine.seconds_per_sample = seconds;
      machine.noise = 0.02;
      machine.preempted = 0.3;
      machine.cold = 0.003;
      machine.random.seed(seed);
      int steps = 0;
      for (; steps < 100 && !planner.settled(); ++steps) {
        run(planner, machine, request(cases[c].samples, kBudget));
      }
      ASSERT_TRUE(planner.settled()) << "case " << c << ", seed " << seed;
      most_steps = std::max(most_steps, steps);
      if (seconds(planner.plan().micro_batch_size()) > 1.05 * fastest) ++wrong;
    }
    EXPECT_LE(wrong, 5) << "case " << c;
    EXPECT_LE(most_steps, 40) << "case " << c;
    RecordProperty("case " + std::to_string(c), std::to_string(wrong) + " wrong, at most " +
                                                    std::to_string(most_steps) + " steps");
  }
}

TEST(Planner, MarksMemoryThatDependsOnTheDataAndAddsAMargin) {
  Planner planner;
  Machine machine;
  machine.irregular = true;
  for (int i = 0; i < 8; ++i) {
    EXPECT_LE(run(planner, machine, request(64, 40000)).peak, 40000);
  }
  // The third trace has size 2 again, so its story differs from the one of 4 too.
  EXPECT_NE(planner.plan().reason.find("margin of 25 %"), std::string::npos)
      << planner.plan().explain();
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

TEST(Planner, SaysTheSmallestBudgetOnceMemoryIsKnown) {
  Planner planner;
  Machine machine;
  for (int i = 0; i < 3; ++i) run(planner, machine, request(64, 20000));
  Request later = request(64, 20000);
  later.baseline_bytes = 15000;  // the optimizer's state has arrived
  try {
    run(planner, machine, later);
    FAIL() << "expected BudgetExceeded";
  } catch (const BudgetExceeded& error) {
    ASSERT_TRUE(error.smallest_feasible().has_value());
    Request enough = later;
    enough.budget_bytes = *error.smallest_feasible();
    EXPECT_NO_THROW(run(planner, machine, enough));
    enough.budget_bytes -= 1;
    EXPECT_THROW(run(planner, machine, enough), BudgetExceeded);
  }
}

/// A single sample takes other kernels, with more workspace: memory does not grow with the size.
constexpr int64_t kSingle = 3000;

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

TEST(Planner, FewSamplesAreTriedWhole) {
  for (int64_t samples = 1; samples < 6; ++samples) {
    Planner planner;
    Machine machine;
    const Step step = run(planner, machine, request(samples, 100000));
    EXPECT_EQ(step.sizes, std::vector<int64_t>{samples});
  }
}

TEST(Planner, KindsOfSamplesAreKeptApart) {
  Planner planner;
  Machine machine;
  run(planner, machine, request(100, 1 << 20));
  Request other = request(100, 1 << 20);
  other.signature = "another kind";
  const Step step = run(planner, machine, other);
  EXPECT_EQ(step.sizes[0], 2) << "a new kind of sample is probed again";
}

TEST(Planner, BatchesOfChangingSizeShareWhatWasLearned) {
  Planner planner;
  Machine machine;
  machine.seconds_per_sample = [](int64_t n) { return 1e-3 + 1e-2 / double(n); };
  for (int i = 0; i < 40; ++i) run(planner, machine, request(1000 + 7 * i, 200000));
  EXPECT_TRUE(planner.settled());
  const Step step = run(planner, machine, request(1999, 200000));
  EXPECT_EQ(sum(step.sizes), 1999);
  EXPECT_TRUE(planner.settled());
}

TEST(Planner, ExplainNamesChoiceBudgetAndAlternatives) {
  Planner planner;
  Machine machine;
  for (int i = 0; i < 12; ++i) run(planner, machine, request(1000, 20000));
  const std::string text = planner.plan().explain();
  for (const char* part : {"strategy stream", "1000 samples", "budget 19.5 KiB", "too large",
                           "fits", "load, forward, loss, backward, free, then hand out once"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(Split, CoversEveryRow) {
  for (int64_t n = 1; n < 40; ++n) {
    for (int64_t size = 1; size < 45; ++size) {
      const auto by = split_by(n, size);
      EXPECT_EQ(sum(by), n);
      EXPECT_LE(*std::max_element(by.begin(), by.end()), size);
      const auto even = split_evenly(n, size);
      EXPECT_EQ(sum(even), n);
      EXPECT_LE(*std::max_element(even.begin(), even.end()), size);
      EXPECT_LE(
          *std::max_element(even.begin(), even.end()) - *std::min_element(even.begin(), even.end()),
          1);
    }
  }
}

}  // namespace
}  // namespace infinitybatch
