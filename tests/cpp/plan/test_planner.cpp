// Sizes that the planner chooses, against a simulated machine whose memory and time are known
// formulas.
#include "execute/schedule.hpp"
#include "plan/planner_machine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace infinitybatch::testing {
namespace {

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

TEST(Planner, CountsWhatSumsOfGradientsTake) {
  for (const double sums : {0.0, 4e-3}) {
    Machine machine;
    machine.sums = sums;
    machine.seconds_per_sample = [](int64_t size) { return size == 64 ? 1e-3 : 0.95e-3; };
    Planner planner;
    const Request wide = request(64, 1 << 20);
    for (int step = 0; step < 40 && !planner.settled(); ++step) run(planner, machine, wide);
    EXPECT_TRUE(planner.settled());
    EXPECT_EQ(planner.plan().micro_batch_size() == 64, sums > 0) << "halves save 5 % but for sums";
  }
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
}  // namespace infinitybatch::testing
