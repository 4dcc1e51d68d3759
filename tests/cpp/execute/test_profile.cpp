// The memory story of a micro-batch of any size, from traces of two sizes, and the simulator that
// tells it for a whole plan: against stories worked out by hand.
#include "execute/profile.hpp"
#include "execute/schedule.hpp"
#include "execute/simulator.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace infinitybatch {
namespace {

using Kind = Operation;

/// Writes a trace by hand. Blocks have numbers; their addresses are made of them.
class Script {
 public:
  explicit Script(int64_t size) { trace_.size = size; }

  Script& begin() {
    trace_.operation_starts.push_back(trace_.events.size());
    return *this;
  }
  Script& allocate(uintptr_t block, int64_t bytes) {
    trace_.events.push_back({at(block), bytes});
    bytes_[block] = bytes;
    return *this;
  }
  Script& free(uintptr_t block) {
    trace_.events.push_back({at(block), -bytes_[block]});
    return *this;
  }
  /// The gradient in `block` comes to a sink whose buffer is `buffer` afterwards.
  Script& gradient(uintptr_t block, uintptr_t buffer, int64_t buffer_bytes) {
    trace_.sinks.push_back({trace_.events.size(), {at(block), at(buffer), buffer_bytes}});
    return *this;
  }
  /// A gradient is added to `buffer` as it is computed.
  Script& product(uintptr_t buffer, int64_t buffer_bytes) {
    trace_.sinks.push_back({trace_.events.size(),
                            {nullptr, at(buffer), buffer_bytes, /*product=*/true},
                            trace_.operation_starts.size()});
    return *this;
  }
  const MicroBatchTrace& trace() const { return trace_; }

 private:
  static const void* at(uintptr_t block) { return reinterpret_cast<const void*>(block * 64); }
  MicroBatchTrace trace_;
  std::map<uintptr_t, int64_t> bytes_;
};

/// A linear layer of 100 bytes of weight on samples of 40 bytes:
///   load      nothing (rows are views)
///   forward   output, 8 bytes a sample
///   loss      scratch of 4 bytes a sample, freed; the loss, 16 bytes
///   backward  output's gradient 8 bytes a sample; the weight's 100 bytes; output and its gradient
///   go free      the loss
/// \param first the weight's gradient becomes the buffer; else it is added to it and freed
MicroBatchTrace linear(int64_t n, bool first) {
  Script script(n);
  script.begin();
  script.begin().allocate(1, 8 * n);
  script.begin().allocate(2, 4 * n).free(2).allocate(3, 16);
  script.begin().allocate(4, 8 * n).allocate(5, 100);
  if (first) {
    script.gradient(5, 5, 100);
  } else {
    script.gradient(5, 77, 100).free(5);
  }
  script.free(4).free(1);
  script.begin().free(3);
  return script.trace();
}

MicroBatchProfile profile_of(const MicroBatchTrace& a, const MicroBatchTrace& b) {
  const auto profile = MicroBatchProfile::fit(a, b);
  EXPECT_TRUE(profile.has_value());
  return *profile;
}

TEST(Profile, TellsEachOperationAtAnySize) {
  const MicroBatchProfile profile = profile_of(linear(2, true), linear(4, false));
  EXPECT_EQ(profile.buffer_bytes(), 100);
  for (const int64_t n : {1, 3, 50}) {
    const auto effect = [&](Kind kind, bool first) { return profile.effect(kind, n, first); };
    EXPECT_EQ(effect(Kind::load, true).rise, 0);
    EXPECT_EQ(effect(Kind::forward, true).rise, 8 * n);
    EXPECT_EQ(effect(Kind::forward, true).net, 8 * n);
    EXPECT_EQ(effect(Kind::loss, false).rise, std::max<int64_t>(4 * n, 16));
    EXPECT_EQ(effect(Kind::loss, false).net, 16);
    EXPECT_EQ(effect(Kind::backward, true).rise, 8 * n + 100);
    EXPECT_EQ(effect(Kind::backward, true).net, 100 - 8 * n) << "the buffer stays";
    EXPECT_EQ(effect(Kind::backward, false).rise, 8 * n + 100);
    EXPECT_EQ(effect(Kind::backward, false).net, -8 * n);
    EXPECT_EQ(effect(Kind::free, true).net, -16);
    EXPECT_EQ(effect(Kind::hand_out, true).rise, 0);
  }
}

TEST(Profile, DoesNotDependOnWhichTraceCameFirst) {
  const MicroBatchProfile one = profile_of(linear(2, true), linear(4, false));
  const MicroBatchProfile two = profile_of(linear(2, false), linear(4, true));
  for (const Operation operation : stream_operations()) {
    for (const bool first : {true, false}) {
      EXPECT_EQ(one.effect(operation, 9, first).rise, two.effect(operation, 9, first).rise);
      EXPECT_EQ(one.effect(operation, 9, first).net, two.effect(operation, 9, first).net);
    }
  }
}

TEST(Profile, KnowsThatAPeakIsNoLineThroughTwoPeaks) {
  // 1,000 bytes whatever the size, then 100 bytes a sample after they are freed.
  const auto trace = [](int64_t n) {
    Script script(n);
    script.begin();
    script.begin().allocate(1, 1000).free(1).allocate(2, 100 * n);
    script.begin();
    script.begin().free(2);
    script.begin();
    return script.trace();
  };
  const MicroBatchProfile profile = profile_of(trace(2), trace(4));
  EXPECT_EQ(profile.effect(Kind::forward, 4, true).rise, 1000);
  EXPECT_EQ(profile.effect(Kind::forward, 50, true).rise, 5000);
}

TEST(Profile, AHalfPrecisionGradientHasABufferOfItsOwn) {
  // The gradient (50 bytes) is copied into a buffer of 100 and freed.
  const auto trace = [](int64_t n, bool first) {
    Script script(n);
    script.begin().begin().begin().begin().allocate(1, 50);
    if (first) script.allocate(9, 100);
    script.gradient(1, 9, 100).free(1);
    script.begin();
    return script.trace();
  };
  const MicroBatchProfile profile = profile_of(trace(2, true), trace(4, false));
  EXPECT_EQ(profile.effect(Kind::backward, 7, true).rise, 150);
  EXPECT_EQ(profile.effect(Kind::backward, 7, true).net, 100);
  EXPECT_EQ(profile.effect(Kind::backward, 7, false).rise, 50);
  EXPECT_EQ(profile.effect(Kind::backward, 7, false).net, 0);
}

TEST(Profile, AProductTakesNoMemoryButItsSum) {
  // Nothing is allocated before it in its operation, or, where the sum is there, at all.
  const auto trace = [](int64_t n, bool first) {
    Script script(n);
    script.begin().begin().begin().allocate(1, 8 * n);
    script.begin();
    if (first) script.allocate(9, 100);
    script.product(9, 100).allocate(2, 4 * n).free(2);
    script.begin().free(1);
    return script.trace();
  };
  for (const bool first_of_two : {true, false}) {
    const MicroBatchProfile profile = profile_of(trace(2, first_of_two), trace(4, false));
    EXPECT_EQ(profile.effect(Kind::loss, 7, true).net, 56);
    EXPECT_EQ(profile.effect(Kind::backward, 7, true).rise, 100 + 28);
    EXPECT_EQ(profile.effect(Kind::backward, 7, true).net, 100);
    EXPECT_EQ(profile.effect(Kind::backward, 7, false).rise, 28);
    EXPECT_EQ(profile.effect(Kind::backward, 7, false).net, 0);
    EXPECT_EQ(profile.buffer_bytes(), 100);
  }
}

TEST(Profile, RefusesStoriesThatDiffer) {
  EXPECT_FALSE(MicroBatchProfile::fit(linear(2, true), linear(2, false)).has_value())
      << "two traces of one size say nothing about others";
  Script other(4);  // an operation allocates once more: routing that depends on the data
  other.begin();
  other.begin().allocate(1, 32).allocate(6, 8).free(6);
  other.begin().allocate(2, 16).free(2).allocate(3, 16);
  other.begin().allocate(4, 32).allocate(5, 100).gradient(5, 77, 100).free(5).free(4).free(1);
  other.begin().free(3);
  EXPECT_FALSE(MicroBatchProfile::fit(linear(2, true), other.trace()).has_value());
}

TEST(Profile, LeavesOutBlocksThatAreOlderThanTheTrace) {
  Script a(2), b(4);
  for (Script* script : {&a, &b}) {
    script->begin().begin().begin().begin();
    script->free(99);  // nothing is known of it
    script->begin();
  }
  const MicroBatchProfile profile = profile_of(a.trace(), b.trace());
  EXPECT_EQ(profile.effect(Kind::backward, 8, true).net, 0);
}

/// Two micro-batches: sums of 64 bytes are made once, each leaves 8 bytes a sample until it is
/// freed, and a weight's gradient of 100 bytes becomes the buffer, or is added to it.
MicroBatchTrace two_micro_batches(int64_t n) {
  Script script(n);
  script.begin().allocate(1, 64).allocate(2, 8 * n);
  script.begin().allocate(3, 8 * n);
  script.begin().allocate(4, 100).gradient(4, 4, 100).free(3);
  script.begin().allocate(5, 100).gradient(5, 4, 100).free(5).free(2);
  return script.trace();
}

TEST(Simulator, WhatExistsOnceIsMadeByTheFirstMicroBatchAlone) {
  Plan plan;
  plan.strategy = "cut";
  for (int64_t i = 0; i < 2; ++i) plan.instructions.push_back({Operation::record, i});
  for (int64_t i = 2; i-- > 0;) plan.instructions.push_back({Operation::backward, i, 0});
  const auto profile =
      MicroBatchProfile::fit(two_micro_batches(2), two_micro_batches(4), steps_of(plan));
  ASSERT_TRUE(profile);
  EXPECT_EQ(profile->micro_batches(), 2);
  EXPECT_EQ(profile->buffer_bytes(), 100);
  plan.micro_batch_sizes = {10, 10, 10};
  plan.batch_size = 30;
  plan.instructions.clear();
  for (int64_t i = 0; i < 3; ++i) plan.instructions.push_back({Operation::record, i});
  EXPECT_EQ(simulate_peak(plan, *profile, 0), 64 + 3 * 80);
  for (int64_t i = 3; i-- > 0;) plan.instructions.push_back({Operation::backward, i, 0});
  // The first backward leaves the buffer, the second has its own gradient beside it.
  EXPECT_EQ(simulate_peak(plan, *profile, 0), 64 + 3 * 80 + 100 + 20);
}

/// One micro-batch whose outputs, 8 bytes a sample, are offloaded until a coupled loss is known and
/// come back to be compared with their replay; the graph takes 20 bytes a sample, the weight's
/// gradient 100 bytes. What stands for the outputs' gradient comes after the replay.
MicroBatchTrace offloaded_outputs(int64_t n) {
  Script script(n);
  script.begin().allocate(1, 20 * n).allocate(2, 8 * n).free(1);  // record
  script.begin().free(2);                                         // offload
  script.begin().allocate(3, 8 * n);                              // fetch
  script.begin().allocate(4, 20 * n).allocate(5, 8 * n);          // replay
  script.begin().allocate(6, 8 * n);                              // seed
  script.begin().allocate(7, 100).gradient(7, 7, 100).free(4);    // backward
  script.begin().free(5).free(3).free(6);                         // free
  return script.trace();
}

TEST(Simulator, AOffloadedGradientComesWithTheOutputsAndGoesWithTheMicroBatch) {
  const std::vector<Step> steps = steps_of(with_offload(rehearsal_plan({2}), /*overlap=*/false));
  ASSERT_EQ(steps.size(), 7U);
  const auto profile = MicroBatchProfile::fit(offloaded_outputs(2), offloaded_outputs(4), steps);
  ASSERT_TRUE(profile);
  const auto peak = [&](bool overlap, int64_t whole_loss) {
    return simulate_peak(with_offload(two_pass_plan({10, 10, 10}, /*retained=*/0), overlap),
                         *profile, /*baseline=*/0, /*begun=*/false, {whole_loss, 0},
                         /*outputs_offload=*/true);
  };
  // Outputs and their gradient come, the replay has its own outputs beside them; from the second on
  // the gradient of the weight is beside its sum.
  const int64_t comes = 2 * 8 * 10;
  const int64_t backward = (8 + 20) * 10 + 100;
  EXPECT_EQ(peak(/*overlap=*/false, 0), 100 + comes + backward);
  EXPECT_EQ(peak(/*overlap=*/false, 2000), 2000) << "nothing is left on the device before the loss";
  // The next ones are on their way.
  EXPECT_EQ(peak(/*overlap=*/true, 0), 100 + 2 * comes + backward);
}

TEST(Simulator, AgreesWithAStoryToldByHand) {
  const MicroBatchProfile profile = profile_of(linear(2, true), linear(4, false));
  // One micro-batch of n: forward 8n, loss 16, backward 8n + 100 on top.
  const Plan whole = stream_plan({10}, false);
  EXPECT_EQ(simulate_peak(whole, profile, 1000), 1000 + 8 * 10 + 16 + 8 * 10 + 100);
  // Later ones find the buffer there: 100 more.
  const Plan two = stream_plan({10, 10}, false);
  EXPECT_EQ(simulate_peak(two, profile, 1000), 1000 + 100 + 8 * 10 + 16 + 8 * 10 + 100);
  // The first is larger than all that follow.
  const Plan uneven = stream_plan({30, 4}, false);
  EXPECT_EQ(simulate_peak(uneven, profile, 1000), 1000 + 8 * 30 + 16 + 8 * 30 + 100);
  // A stretch in the middle of a step starts with the buffers full.
  EXPECT_EQ(simulate_peak(whole, profile, 1000, /*begun=*/true),
            1000 + 100 + 8 * 10 + 16 + 8 * 10 + 100);
}

TEST(Simulator, ReadsTheInstructionsThatTheExecutorRuns) {
  const MicroBatchProfile profile = profile_of(linear(2, true), linear(4, false));
  Plan plan = stream_plan({5, 5}, true);
  // Without backward and free of the first, its activations stay under the second.
  std::erase_if(plan.instructions, [](const Instruction& instruction) {
    return instruction.micro_batch == 0 && (instruction.operation == Operation::backward ||
                                            instruction.operation == Operation::free);
  });
  EXPECT_EQ(simulate_peak(plan, profile, 0), (8 * 5 + 16) + 8 * 5 + 16 + 8 * 5 + 100);
}

TEST(Plan, SplitsEveryBatchWithoutLosingASample) {
  for (int64_t batch = 1; batch <= 40; ++batch) {
    for (int64_t size = 1; size <= 45; ++size) {
      int64_t by = 0, evenly = 0, smallest = batch, largest = 0;
      for (const int64_t part : split_by(batch, size)) {
        EXPECT_GE(part, 1);
        EXPECT_LE(part, size);
        by += part;
      }
      const auto parts = split_evenly(batch, size);
      for (const int64_t part : parts) {
        evenly += part;
        smallest = std::min(smallest, part);
        largest = std::max(largest, part);
      }
      EXPECT_EQ(by, batch);
      EXPECT_EQ(evenly, batch);
      EXPECT_LE(largest - smallest, 1);
      EXPECT_LE(largest, size);
      EXPECT_EQ(parts.size(), split_by(batch, size).size()) << "as few as possible";
    }
  }
}

TEST(Plan, StreamsMicroBatchAfterMicroBatchAndHandsOutOnce) {
  const Plan plan = stream_plan({3, 2}, true);
  std::string text;
  for (const Instruction& instruction : plan.instructions) {
    text +=
        std::string(name_of(instruction.operation)) + std::to_string(instruction.micro_batch) + " ";
  }
  EXPECT_EQ(text,
            "load0 forward0 loss0 backward0 free0 load1 forward1 loss1 backward1 free1 penalty-1 "
            "hand out-1 ");
  EXPECT_EQ(plan.batch_size, 5);
  EXPECT_EQ(plan.micro_batch_size(), 3);
}

TEST(Plan, ExplainsSizesBudgetAndReason) {
  Plan plan = stream_plan({4, 4, 3}, false);
  plan.budget_bytes = 3 << 20;
  plan.baseline_bytes = 1 << 20;
  plan.predicted_peak_bytes = 2 << 20;
  plan.predicted_seconds = 0.25;
  plan.reason = "the fastest of two";
  plan.candidates = {{4, 2 << 20, 0.5, true}, {8, 5 << 20, std::nullopt, false}};
  const std::string text = plan.explain();
  for (const char* part : {"11 samples", "2 × 4 + 1 × 3", "3 MiB", "1 MiB", "2 MiB", "250 ms",
                           "the fastest of two", "5 MiB", "500 ms", "too large", "fits"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
}

}  // namespace
}  // namespace infinitybatch
