// Where copies of what waits stand in a plan, and how much of their time is hidden there: against
// stories worked out by hand.
#include "execute/pass_times.hpp"
#include "execute/schedule.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace infinitybatch {
namespace {

std::string tell(const Plan& plan) {
  std::string text;
  for (const Instruction& instruction : plan.instructions) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(instruction.operation));
    if (instruction.micro_batch >= 0) text += " " + std::to_string(instruction.micro_batch);
    if (instruction.segment >= 0) text += "." + std::to_string(instruction.segment);
  }
  return text;
}

Plan cut(int64_t micro_batches, bool coupled) {
  return cut_plan(std::vector<int64_t>(static_cast<size_t>(micro_batches), 4), /*segments=*/2,
                  /*retained=*/0, coupled, /*penalty=*/false);
}

TEST(OffloadPlan, InTurnEachVisitFetchesAndOffloads) {
  EXPECT_EQ(tell(with_offload(cut(2, /*coupled=*/false), /*overlap=*/false)),
            "record 0, record 1, "
            "restore 0.0, advance 0.0, finish offload 0.0, restore 1.0, advance 1.0, finish "
            "offload 1.0, combine.1, "
            "restore 0.1, resume 0.1, loss 0, backward 0.1, free 0.1, finish offload 0.1, "
            "restore 1.1, resume 1.1, loss 1, backward 1.1, free 1.1, finish offload 1.1, "
            "combine gradients.1, "
            "restore 1.0, resume 1.0, backward 1.0, free 1.0, finish offload 1.0, "
            "restore 0.0, resume 0.0, backward 0.0, free 0.0, finish offload 0.0, hand out");
}

TEST(OffloadPlan, OutputsWaitForALossAndComeBackToBeReplayed) {
  const Plan plan = two_pass_plan({4, 4}, /*retained=*/0);
  EXPECT_EQ(tell(with_offload(plan, /*overlap=*/false)),
            "record 0, finish offload 0, record 1, finish offload 1, loss of all, "
            "restore 1, replay 1, backward 1, free 1, restore 0, replay 0, backward 0, free 0, "
            "hand out");
  EXPECT_EQ(tell(with_offload(plan, /*overlap=*/true)),
            "record 0, start offload 0, record 1, finish offload 0, start offload 1, finish "
            "offload 1, loss of all, "
            "restore 1, prefetch 0, replay 1, backward 1, free 1, replay 0, backward 0, free 0, "
            "hand out");
}

TEST(OffloadPlan, GraphsThatAreKeptLeaveWithTheOutputs) {
  const Plan some = two_pass_plan({4, 4, 4}, /*retained=*/2, /*offloads_graphs=*/true);
  EXPECT_EQ(some.offloaded_graphs(), 2);
  EXPECT_EQ(tell(with_offload(some, /*overlap=*/true)),
            "record 0, start offload 0, retain 1, finish offload 0, start offload 1, retain 2, "
            "finish offload 1, start offload 2, finish offload 2, "
            "loss of all, restore 2, prefetch 1, replay 2, backward 2, free 2, "
            "prefetch 0, replay 1, backward 1, free 1, replay 0, backward 0, free 0, hand out");
  EXPECT_EQ(tell(with_offload(rehearsal_plan({4}, /*offloads_graphs=*/true), /*overlap=*/false)),
            "retain 0, finish offload 0, restore 0, replay 0, seed 0, backward 0, free 0");
  // Where they stay nothing of them leaves.
  const Plan kept = two_pass_plan({4, 4}, /*retained=*/1);
  EXPECT_EQ(kept.offloaded_graphs(), 0);
  EXPECT_EQ(
      tell(with_offload(kept, /*overlap=*/false)),
      "record 0, finish offload 0, retain 1, loss of all, restore 1, replay 1, backward 1, free 1, "
      "restore 0, replay 0, backward 0, free 0, hand out");
}

TEST(OffloadPlan, OverlappedTheNextComesAndTheLastLeavesMeanwhile) {
  EXPECT_EQ(
      tell(with_offload(cut(3, /*coupled=*/false), /*overlap=*/true)),
      "record 0, record 1, record 2, "
      "restore 0.0, prefetch 1.0, advance 0.0, start offload 0.0, "
      "prefetch 2.0, advance 1.0, finish offload 0.0, start offload 1.0, "
      "prefetch 0.1, advance 2.0, finish offload 1.0, start offload 2.0, combine.1, "
      "prefetch 1.1, resume 0.1, loss 0, backward 0.1, free 0.1, finish offload 2.0, start offload "
      "0.1, "
      "prefetch 2.1, resume 1.1, loss 1, backward 1.1, free 1.1, finish offload 0.1, start offload "
      "1.1, "
      // The last one begins the way back: what it leaves behind is what it needs.
      "resume 2.1, loss 2, backward 2.1, free 2.1, finish offload 1.1, start offload 2.1, "
      "combine gradients.1, finish offload 2.1, "
      "restore 2.0, prefetch 1.0, resume 2.0, backward 2.0, free 2.0, start offload 2.0, "
      "prefetch 0.0, resume 1.0, backward 1.0, free 1.0, finish offload 2.0, start offload 1.0, "
      "resume 0.0, backward 0.0, free 0.0, finish offload 1.0, start offload 0.0, finish offload "
      "0.0, hand out");
}

TEST(OffloadPlan, NothingIsOnItsWayWhileTheLossOfAllIsComputed) {
  for (const int64_t micro_batches : {1, 2, 3, 7}) {
    const Plan plan = with_offload(cut(micro_batches, /*coupled=*/true), /*overlap=*/true);
    int64_t leaving = 0;
    int64_t coming = 0;
    for (const Instruction& instruction : plan.instructions) {
      switch (instruction.operation) {
        case Operation::start_offload:
          ++leaving;
          break;
        case Operation::finish_offload:
          --leaving;
          break;
        case Operation::prefetch:
          ++coming;
          break;
        case Operation::advance:
        case Operation::resume:
          coming = std::max<int64_t>(coming - 1, 0);
          break;
        case Operation::whole_loss:
        case Operation::hand_out:
          EXPECT_EQ(leaving, 0);
          EXPECT_EQ(coming, 0);
          break;
        default:
          break;
      }
      EXPECT_LE(leaving, 1);
      EXPECT_LE(coming, 2) << "the one at work's and the next one's";
    }
  }
}

TEST(OffloadPlan, SegmentsOfOneMicroBatchComeWhileTheOneBehindThemIsAtWork) {
  EXPECT_EQ(
      tell(with_offload(checkpoint_plan({4}, {3}, /*coupled=*/false, /*penalty=*/false),
                        /*overlap=*/true)),
      "record 0, restore 0.2, prefetch 0.1, resume 0.2, loss 0, backward 0.2, free 0.2, "
      "finish offload 0.2, prefetch 0.0, resume 0.1, backward 0.1, free 0.1, finish offload 0.1, "
      "resume 0.0, backward 0.0, free 0.0, finish offload 0.0, hand out");
}

// Two segments in front of the op that sees the whole batch, one behind it; the other micro-batch's
// tape is cut for memory behind it as well.
TEST(OffloadPlan, AStretchThatIsCutForMemoryIsMadeAgainOnTheWayBack) {
  const Plan plan = cut_plan({4, 2}, {{2, 3}, {2, 4}}, /*retained=*/0, /*coupled=*/false,
                             /*penalty=*/false);
  EXPECT_EQ(plan.strategy, "checkpoint");
  EXPECT_EQ(plan.segments, 4);
  EXPECT_EQ(tell(plan),
            "record 0, record 1, advance 0.0, advance 0.1, advance 1.0, advance 1.1, combine.1, "
            "resume 0.2, loss 0, backward 0.2, free 0.2, "
            "resume 1.3, loss 1, backward 1.3, free 1.3, resume 1.2, backward 1.2, free 1.2, "
            "combine gradients.1, "
            "resume 1.1, backward 1.1, free 1.1, resume 1.0, backward 1.0, free 1.0, "
            "resume 0.1, backward 0.1, free 0.1, resume 0.0, backward 0.0, free 0.0, hand out");
  EXPECT_EQ(
      tell(with_offload(cut_plan({4}, {{1, 3}}, /*retained=*/0, /*coupled=*/true,
                                 /*penalty=*/false),
                        /*overlap=*/false)),
      "record 0, restore 0.0, advance 0.0, finish offload 0.0, combine.1, "
      "restore 0.1, advance 0.1, finish offload 0.1, restore 0.2, advance 0.2, finish offload 0.2, "
      "loss of all, "
      "restore 0.2, resume 0.2, backward 0.2, free 0.2, finish offload 0.2, "
      "restore 0.1, resume 0.1, backward 0.1, free 0.1, finish offload 0.1, combine gradients.1, "
      "restore 0.0, resume 0.0, backward 0.0, free 0.0, finish offload 0.0, hand out");
}

/// Every `advance` and `resume` of 4 samples takes a second, each copy to the device or away
/// moves 40 bytes.
PassTimes one_second_each(const Plan& plan, double seconds_for_40_bytes) {
  PassTimes times;
  for (const Instruction& instruction : plan.instructions) {
    const Operation operation = instruction.operation;
    const bool computes = operation == Operation::advance || operation == Operation::resume;
    const std::string name = name_of(operation);
    const bool begins_out = name == (plan.overlaps ? "start offload" : "finish offload");
    const bool copies = name == "restore" || name == "prefetch" || begins_out;
    times.add(instruction, 4, computes ? 1 : 0, copies ? 40 : 0);
  }
  times.set_link(40, seconds_for_40_bytes, 40, seconds_for_40_bytes);
  return times;
}

TEST(OffloadPlan, InTurnNothingIsHidden) {
  const Plan plan = with_offload(cut(5, /*coupled=*/false), /*overlap=*/false);
  const CopySeconds seconds = simulate_copies(plan, one_second_each(plan, 0.25));
  // 15 visits, each of which restores and offloads.
  EXPECT_NEAR(seconds.waited, 15 * 2 * 0.25, 1e-9);
  EXPECT_NEAR(seconds.hidden, 0, 1e-9);
}

TEST(OffloadPlan, OverlappedWhatIsShorterThanComputeIsHidden) {
  const Plan plan = with_offload(cut(5, /*coupled=*/false), /*overlap=*/true);
  const CopySeconds seconds = simulate_copies(plan, one_second_each(plan, 0.25));
  // Not behind anything: the first visit's fetch; between the two passes the last micro-batch's
  // values leave and come back; the last visit's leave.
  EXPECT_NEAR(seconds.waited, 4 * 0.25, 1e-9);
  EXPECT_NEAR(seconds.hidden, (15 * 2 - 4) * 0.25, 1e-9);
}

TEST(OffloadPlan, OverlappedWhatIsLongerThanComputeIsWaitedFor) {
  const Plan plan = with_offload(cut(5, /*coupled=*/false), /*overlap=*/true);
  const CopySeconds seconds = simulate_copies(plan, one_second_each(plan, 2));
  EXPECT_NEAR(seconds.waited + seconds.hidden, 15 * 2 * 2, 1e-9);
  EXPECT_LE(seconds.hidden, 15) << "no more than there is to hide behind";
  EXPECT_GE(seconds.hidden, 10);
}

TEST(OffloadPlan, AGraphThatStaysOnTheDeviceIsToldByRecordings) {
  PassTimes times;
  for (const auto& [operation, seconds] :
       {std::pair(Operation::record, 1.0), {Operation::replay, 2.0}, {Operation::backward, 3.0}}) {
    times.add({operation, 0}, /*samples=*/4, 4 * seconds, /*bytes=*/0);
  }
  for (const int64_t retained : {0, 1, 3}) {
    const Plan plan = two_pass_plan({2, 2, 2}, retained);
    EXPECT_NEAR(simulate_seconds(plan, times), 6 * (1 + 3) + 2 * (3 - retained) * 2, 1e-9);
  }
}

TEST(OffloadPlan, ARehearsalInTurnTellsOfCopiesBesideCompute) {
  const Plan plan = two_pass_plan({4, 4, 4}, /*retained=*/3, /*offloads_graphs=*/true);
  const auto add = [](PassTimes& times, Operation operation, double seconds, int64_t bytes,
                      bool back = false) {
    times.add({operation, 0, -1, back}, /*samples=*/4, seconds, bytes);
  };
  PassTimes times;
  add(times, Operation::retain, 1, 0);
  add(times, Operation::finish_offload, 0, 40);
  add(times, Operation::restore, 0, 40, /*back=*/true);
  add(times, Operation::backward, 1, 0);
  times.set_link(40, 0.5, 40, 0.5);
  EXPECT_NEAR(times.bytes_per_sample(Operation::finish_offload), 10, 1e-9);
  const CopySeconds in_turn = simulate_copies(with_offload(plan, /*overlap=*/false), times);
  EXPECT_NEAR(in_turn.waited, 3 * 2 * 0.5, 1e-9);
  EXPECT_NEAR(simulate_seconds(with_offload(plan, /*overlap=*/false), times), 6 + 3, 1e-9);
  // The last one's copies have nothing to hide behind.
  const CopySeconds beside = simulate_copies(with_offload(plan, /*overlap=*/true), times);
  EXPECT_NEAR(beside.waited, 2 * 0.5, 1e-9);
  EXPECT_NEAR(beside.hidden, 4 * 0.5, 1e-9);
  EXPECT_NEAR(simulate_seconds(with_offload(plan, /*overlap=*/true), times), 6 + 1, 1e-9);
  // What was not told to begin with `leave` is waited for.
  PassTimes late = times;
  add(late, Operation::start_offload, 0, 40);
  EXPECT_NEAR(simulate_copies(with_offload(plan, /*overlap=*/true), late).waited, 5 * 0.5, 1e-9);
}

TEST(OffloadPlan, SizesOfMicroBatchesScaleWhatWasMeasured) {
  const Plan measured = with_offload(cut(5, /*coupled=*/false), /*overlap=*/false);
  Plan twice = measured;
  for (int64_t& size : twice.micro_batch_sizes) size *= 2;
  twice.batch_size *= 2;
  const PassTimes times = one_second_each(measured, 0.25);
  EXPECT_NEAR(simulate_copies(twice, times).waited, 2 * simulate_copies(measured, times).waited,
              1e-9);
}

}  // namespace
}  // namespace infinitybatch
