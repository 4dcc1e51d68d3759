// Which boundary activations are kept: against all choices there are.
#include "plan/boundaries.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace infinitybatch::plan {
namespace {

constexpr int64_t kSamples = 4;
constexpr int64_t kBatch = 100;

/// A chain of ops of the whole batch, in front of each of which something waits; values that cross
/// several of them too.
class Chain {
 public:
  explicit Chain(int64_t ops) { recorded_.segments.resize(static_cast<size_t>(ops) + 1); }

  /// \param bytes of a sample
  void give(int64_t giver, std::vector<int64_t> users, int64_t bytes) {
    const auto value = static_cast<tape::ValueId>(recorded_.tape.memories.size());
    recorded_.tape.memories.push_back(value);
    recorded_.tape.memory_bytes.push_back(bytes * kSamples);
    recorded_.segments[static_cast<size_t>(giver)].gives.push_back(value);
    recorded_.users[{value, static_cast<int32_t>(giver)}] = std::move(users);
  }
  Boundaries boundaries(bool coupled) const { return {recorded_, kSamples, coupled}; }

 private:
  Recorded recorded_;
};

Chain even(int64_t ops) {
  Chain chain(ops);
  for (int64_t s = 0; s < ops; ++s) chain.give(s, {s + 1}, 10);
  return chain;
}

Chain uneven(int64_t ops, std::mt19937& random) {
  Chain chain(ops);
  const auto draw = [&](int64_t from, int64_t to) {
    return std::uniform_int_distribution<int64_t>(from, to)(random);
  };
  for (int64_t s = 0; s < ops; ++s) {
    chain.give(s, {s + 1}, draw(1, 40));
    const int64_t last = draw(s + 1, ops);
    if (draw(0, 1) == 0)
      chain.give(s, last > s + 1 ? std::vector{s + 1, last} : std::vector{last}, 9);
  }
  return chain;
}

std::vector<Boundaries::Choice> every_choice(const Boundaries& boundaries) {
  std::vector<Boundaries::Choice> choices;
  for (int64_t bits = 0; bits < int64_t{1} << boundaries.ops(); ++bits) {
    std::vector<int64_t> kept;
    for (int64_t op = 1; op <= boundaries.ops(); ++op) {
      if ((bits >> (op - 1) & 1) != 0) kept.push_back(op);
    }
    choices.push_back(boundaries.with(kept, kBatch));
  }
  return choices;
}

TEST(Boundaries, TheChoiceTakesTheLeastTimeOfAllThatFit) {
  std::mt19937 random(0);
  for (int round = 0; round < 40; ++round) {
    const bool coupled = round % 2 == 0;
    const Boundaries boundaries = uneven(2 + round % 7, random).boundaries(coupled);
    const auto choices = every_choice(boundaries);
    const auto least =
        std::min_element(choices.begin(), choices.end(),
                         [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
    EXPECT_FALSE(boundaries.within(least->bytes - 2, kBatch).has_value());
    EXPECT_LE(boundaries.least(kBatch).bytes, least->bytes + 1);
    for (const auto& limit : choices) {
      double best = 2;
      for (const auto& choice : choices) {
        if (choice.bytes <= limit.bytes) best = std::min(best, choice.again);
      }
      // Bytes are rounded down.
      const auto found = boundaries.within(limit.bytes + 1, kBatch);
      ASSERT_TRUE(found.has_value());
      EXPECT_LE(found->bytes, limit.bytes + 1);
      EXPECT_LE(found->again, best + 1e-12);
    }
  }
}

TEST(Boundaries, ALongChainTakesAboutTheRootOfItsBytes) {
  const Boundaries boundaries = even(64).boundaries(/*coupled=*/false);
  const auto all = boundaries.with(std::nullopt, kBatch);
  EXPECT_EQ(all.again, 0);
  EXPECT_EQ(all.bytes, 64 * 10 * kBatch);
  const auto least = boundaries.least(kBatch);
  // Eight blocks of eight, and the gradients at one op.
  EXPECT_LE(least.bytes, 17 * 10 * kBatch);
  EXPECT_LE(least.again, 1);
  ASSERT_TRUE(least.kept.has_value());
  EXPECT_GE(least.kept->size(), 5U);
}

TEST(Boundaries, MoreBytesNeverTakeMoreTime) {
  const Boundaries boundaries = even(17).boundaries(/*coupled=*/true);
  double before = 2;
  for (int64_t bytes = boundaries.least(kBatch).bytes; bytes <= 17 * 10 * kBatch; bytes += 500) {
    const auto found = boundaries.within(bytes, kBatch);
    ASSERT_TRUE(found.has_value());
    EXPECT_LE(found->again, before);
    before = found->again;
  }
  EXPECT_EQ(boundaries.within(17 * 10 * kBatch, kBatch)->again, 0);
}

TEST(Boundaries, MeasuredTimesDecideWhereBytesDoNot) {
  const Boundaries boundaries = even(4).boundaries(/*coupled=*/false);
  // One of the three boundaries has to go: the one behind the segment that takes the least.
  const int64_t bytes = 4 * 10 * kBatch - 1;
  for (int64_t cheap = 0; cheap < 3; ++cheap) {
    std::map<int64_t, double> seconds;
    for (int64_t s = 0; s < 4; ++s) seconds[s] = s == cheap ? 1e-3 / double(cheap + 1) : 1;
    Boundaries timed = boundaries;
    timed.learn({{0, 5.0}});  // of some only
    timed.learn(seconds);
    timed.learn({{cheap, 7.0}});  // slower than before
    const auto found = timed.within(bytes, kBatch);
    ASSERT_TRUE(found && found->kept);
    EXPECT_FALSE(std::binary_search(found->kept->begin(), found->kept->end(), cheap + 1));
    EXPECT_EQ(found->kept->size(), 2U);
  }
}

// A budget that is said to be enough for it is asked for in a step that measures other times.
TEST(Boundaries, TheFewestBytesAreTheSameChoiceWhateverTimesWereSeen) {
  std::mt19937 random(1);
  for (int64_t ops = 2; ops < 9; ++ops) {
    const Chain chain = even(ops);
    const auto kept = chain.boundaries(/*coupled=*/true).least(kBatch).kept;
    for (int round = 0; round < 10; ++round) {
      Boundaries timed = chain.boundaries(/*coupled=*/true);
      std::map<int64_t, double> seconds;
      for (int64_t s = 0; s <= ops; ++s) seconds[s] = 1.0 + static_cast<double>(random() % 100);
      timed.learn(seconds);
      EXPECT_EQ(timed.least(kBatch).kept, kept);
    }
  }
}

TEST(Boundaries, WhereAllArriveAtOnceNothingIsChosen) {
  const Boundaries boundaries = even(1).boundaries(/*coupled=*/false);
  EXPECT_EQ(boundaries.least(kBatch).kept, std::nullopt);
}

}  // namespace
}  // namespace infinitybatch::plan
