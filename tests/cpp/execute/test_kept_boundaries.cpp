// Plans in which boundary activations of the whole batch are kept in front of some ops and computed
// again in front of the others: against stories worked out by hand.
#include "execute/schedule.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace infinitybatch {
namespace {

/// What the last of two micro-batches does, with `!` where it leaves what is saved in front.
std::string story_of(const Plan& plan) {
  std::string text;
  for (const Instruction& instruction : plan.instructions) {
    if (instruction.micro_batch == 0) continue;
    const bool whole = instruction.micro_batch < 0;
    const Operation operation = instruction.operation;
    if (operation == Operation::free || operation == Operation::backward) continue;
    text += (text.empty() ? "" : ", ") + std::string(name_of(operation));
    if (instruction.segment >= 0) text += (whole ? "." : " ") + std::to_string(instruction.segment);
    if (instruction.leaves) text += "!";
  }
  return text;
}

KeptBoundaries kept(std::vector<int64_t> ops) {
  return ops;
}

Plan plan_with(bool coupled, const KeptBoundaries& ops) {
  return cut_plan({4, 4}, /*segments=*/5, /*retained=*/0, coupled, /*penalty=*/false, ops);
}

TEST(KeptBoundaries, ABlockIsComputedAgainWhenTheWayBackArrivesAtItsEnd) {
  // Behind the last op of a stream all have just arrived.
  EXPECT_EQ(
      story_of(plan_with(/*coupled=*/false, kept({2}))),
      "record, advance 0, combine.1, advance 1!, combine.2, advance 2, combine.3, advance 3!, "
      "combine.4, resume 4, loss, combine gradients.4, "
      "recompute 2, resume 3, combine gradients.3, resume 2, combine gradients.2, "
      "recompute 0, resume 1, combine gradients.1, resume 0, hand out");
}

TEST(KeptBoundaries, ACoupledLossComesBehindTheLastBlock) {
  EXPECT_EQ(
      story_of(plan_with(/*coupled=*/true, kept({2}))),
      "record, advance 0, combine.1, advance 1!, combine.2, advance 2, combine.3, advance 3!, "
      "combine.4, advance 4!, loss of all, "
      "recompute 2, recompute 3, resume 4, combine gradients.4, resume 3, combine gradients.3, "
      "resume 2, combine gradients.2, "
      "recompute 0, resume 1, combine gradients.1, resume 0, hand out");
}

TEST(KeptBoundaries, NoneIsOneBlockFromTheInputs) {
  EXPECT_EQ(story_of(plan_with(/*coupled=*/false, kept({}))),
            "record, advance 0, combine.1, advance 1!, combine.2, advance 2!, combine.3, advance "
            "3!, combine.4, resume 4, loss, combine gradients.4, "
            "recompute 0, recompute 1, recompute 2, resume 3, combine gradients.3, resume 2, "
            "combine gradients.2, resume 1, combine gradients.1, resume 0, hand out");
}

TEST(KeptBoundaries, AllAreThePlanWithoutAChoice) {
  for (const bool coupled : {false, true}) {
    EXPECT_EQ(story_of(plan_with(coupled, kept({1, 2, 3, 4}))),
              story_of(plan_with(coupled, std::nullopt)));
  }
}

TEST(KeptBoundaries, ThePlanSaysWhich) {
  EXPECT_EQ(plan_with(/*coupled=*/false, kept({1, 3})).explain_kept(),
            "boundary activations are kept at 2 of 4 ops that see the whole batch (numbered 1, 3), "
            "and computed again in front of the others");
  EXPECT_EQ(plan_with(/*coupled=*/false, kept({})).explain_kept(),
            "boundary activations are kept at none of 4 ops that see the whole batch, and computed "
            "again in front of the others");
  EXPECT_EQ(plan_with(/*coupled=*/false, std::nullopt).explain_kept(), "");
  EXPECT_NE(plan_with(/*coupled=*/false, kept({1, 3})).explain().find("(numbered 1, 3)"),
            std::string::npos);
}

}  // namespace
}  // namespace infinitybatch
