#include "step/recovery.hpp"

#include "execute/external_loss.hpp"
#include "execute/row_look.hpp"
#include "step/meter.hpp"
#include "tape/mismatch.hpp"
#include "tape/witness.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

const char* name_of(Failure failure) {
  switch (failure) {
    case Failure::other_replay:
      return "other replay";
    case Failure::other_values:
      return "other values";
    case Failure::other_segments:
      return "other segments";
    case Failure::nothing_to_cut:
      return "nothing to cut";
    case Failure::coupling:
      return "coupling";
    case Failure::not_joined:
      return "not joined";
    case Failure::no_room_to_look:
      return "no room to look";
    case Failure::looked_too_far:
      return "looked too far";
    case Failure::no_plan:
      return "no plan";
    case Failure::no_room_to_offload:
      return "no room to offload";
    case Failure::out_of_memory:
      return "out of memory";
    case Failure::segment_out_of_memory:
      return "segment out of memory";
    case Failure::loss_out_of_memory:
      return "loss out of memory";
    case Failure::other:
      return "other";
  }
  return "";
}

const char* name_of(Answer answer) {
  switch (answer) {
    case Answer::rerun_forwards:
      return "rerun forwards";
    case Answer::look_less:
      return "look less";
    case Answer::record_anew:
      return "record anew";
    case Answer::follow_segments:
      return "follow segments";
    case Answer::cut:
      return "cut";
    case Answer::stop_cutting:
      return "stop cutting";
    case Answer::whole_batch:
      return "whole batch";
    case Answer::larger_micro_batches:
      return "larger micro-batches";
    case Answer::drop_graphs:
      return "drop graphs";
    case Answer::copy_in_turn:
      return "copy in turn";
    case Answer::smaller_micro_batches:
      return "smaller micro-batches";
    case Answer::second_forwards:
      return "second forwards";
    case Answer::recompute:
      return "recompute";
    case Answer::offload:
      return "offload";
    case Answer::checkpoint:
      return "checkpoint";
    case Answer::drop_boundaries:
      return "drop boundaries";
    case Answer::smaller_segments:
      return "smaller segments";
    case Answer::forward_again:
      return "forward again";
    case Answer::forget_frontiers:
      return "forget frontiers";
  }
  return "";
}

class RecoveryRow : public ::testing::TestWithParam<Recovery> {};

TEST_P(RecoveryRow, AnswersAreTriedInOrderAndTheFirstThatAppliesIsTaken) {
  const Recovery& row = GetParam();
  for (size_t applies = 0; applies <= row.answers.size(); ++applies) {
    std::vector<Answer> tried;
    Answers answers;
    for (const Answer answer : row.answers) {
      answers[answer] = [&, answer] {
        tried.push_back(answer);
        return tried.size() == applies + 1;
      };
    }
    const std::optional<Answer> found = recover(row.failure, answers);
    const bool none = applies == row.answers.size();
    ASSERT_EQ(found.has_value(), !none);
    if (!none) {
      EXPECT_EQ(*found, row.answers[applies]);
    }
    const auto last =
        row.answers.begin() + static_cast<std::ptrdiff_t>(none ? applies : applies + 1);
    EXPECT_EQ(tried, std::vector<Answer>(row.answers.begin(), last));
  }
}

TEST_P(RecoveryRow, WhatIsNotAmongTheAnswersIsPassedOver) {
  const Recovery& row = GetParam();
  EXPECT_EQ(recover(row.failure, {}), std::nullopt);
  const Answer last = row.answers.back();
  EXPECT_EQ(recover(row.failure, {{last, [] { return true; }}}), last);
}

INSTANTIATE_TEST_SUITE_P(Step, RecoveryRow, ::testing::ValuesIn(recovery_table()),
                         [](const auto& row) {
                           std::string name = name_of(row.param.failure);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(Recovery, HasOneRowForEachFailureAndNoAnswerTwiceInOne) {
  std::set<Failure> failures;
  for (const Recovery& row : recovery_table()) {
    EXPECT_TRUE(failures.insert(row.failure).second) << name_of(row.failure);
    const std::set<Answer> answers(row.answers.begin(), row.answers.end());
    EXPECT_EQ(answers.size(), row.answers.size()) << name_of(row.failure);
    EXPECT_FALSE(answers.empty());
  }
  EXPECT_EQ(failures.size(), static_cast<size_t>(Failure::other) + 1);
}

TEST(Recovery, WhatCannotRunOutOfMemoryIsNoRestart) {
  for (const Recovery& row : recovery_table()) {
    for (const Answer answer : row.answers) {
      const bool learned = row.failure == Failure::coupling ||
                           row.failure == Failure::other_segments ||
                           row.failure == Failure::nothing_to_cut ||
                           row.failure == Failure::not_joined || row.failure == Failure::other;
      EXPECT_EQ(is_restart(answer), !learned) << name_of(answer);
    }
  }
}

template <typename Throw>
Failed thrown(Throw&& raise) {
  try {
    raise();
  } catch (...) {
    return Failed(std::current_exception());
  }
  return {};
}

TEST(Recovery, TellsFailuresApart) {
  EXPECT_EQ(thrown([] { throw SegmentsChanged(4); }).failure, Failure::other_segments);
  EXPECT_EQ(thrown([] { throw SegmentsChanged(4); }).segments, 4);
  EXPECT_EQ(thrown([] { throw NothingToCut(); }).failure, Failure::nothing_to_cut);
  EXPECT_EQ(thrown([] { throw CouplingError("aten::op", "couples"); }).failure, Failure::coupling);
  EXPECT_EQ(thrown([] { throw BatchError("no list of all"); }).failure, Failure::not_joined);
  EXPECT_EQ(thrown([] { throw NoRoomToLook(3, 2, 1, /*backward=*/false); }).failure,
            Failure::no_room_to_look);
  EXPECT_EQ(thrown([] { throw LookedTooFar(); }).failure, Failure::looked_too_far);
  const Failed plan = thrown([] { throw BudgetExceeded(3, 2, std::nullopt, "It"); });
  EXPECT_EQ(plan.failure, Failure::no_plan);
  ASSERT_TRUE(plan.refusal);
  EXPECT_EQ(plan.refusal->needed(), 3);
  EXPECT_EQ(thrown([] { throw OffloadError(1, 0, "full"); }).failure, Failure::no_room_to_offload);
  EXPECT_EQ(thrown([] { throw Unsupported("it"); }).failure, Failure::other);
  EXPECT_EQ(thrown([] { throw std::runtime_error("the user's"); }).failure, Failure::other);
}

}  // namespace
}  // namespace infinitybatch
