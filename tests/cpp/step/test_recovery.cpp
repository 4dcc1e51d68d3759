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

class RecoveryRow : public ::testing::TestWithParam<Recovery> {};

TEST_P(RecoveryRow, AnswersAreTriedInOrderAndTheFirstThatAppliesIsTaken) {
  const Recovery& row = GetParam();
  for (size_t applies = 0; applies <= row.answers.size(); ++applies) {
    std::vector<Answer> tried;
    const std::optional<Answer> found = recover(row.failure, [&](Answer answer) {
      tried.push_back(answer);
      return tried.size() == applies + 1;
    });
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
                           row.failure == Failure::nothing_to_cut || row.failure == Failure::other;
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
  EXPECT_EQ(thrown([] { throw NoRoomToLook(3, 2, 1); }).failure, Failure::no_room_to_look);
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
