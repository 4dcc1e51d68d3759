// The table itself: nothing that the suite promises to cover may fall out of it unnoticed, and its
// measure must be able to fail.
#include "exactness/exactness.hpp"

#include <map>
#include <set>

namespace infinitybatch::testing {
namespace {

std::string kind_of(const CriterionCase& criterion) {
  return criterion.name.substr(0, criterion.name.find('/'));
}

TEST(ExactnessTable, EveryRowOfEveryCriterionIsRun) {
  std::set<const CriterionCase*> run;
  for (const Pair& pair : pairs()) run.insert(pair.criterion);
  EXPECT_EQ(run.size(), criterion_cases().size());
}

TEST(ExactnessTable, EveryFamilyMeetsSeveralKindsOfCriteria) {
  std::map<std::string, std::set<std::string>> kinds;
  for (const Pair& pair : pairs()) kinds[pair.family->name].insert(kind_of(*pair.criterion));
  EXPECT_GE(kinds.size(), 25u);
  EXPECT_EQ(kinds.size(), families().size());
  for (const auto& [family, seen] : kinds) EXPECT_GE(seen.size(), 3u) << family;
}

TEST(ExactnessTable, EveryKindOfCriterionMeetsSeveralFamilies) {
  std::map<std::string, std::set<std::string>> met;
  for (const Pair& pair : pairs()) met[kind_of(*pair.criterion)].insert(pair.family->name);
  EXPECT_EQ(met.size(), 22u);
  for (const auto& [kind, seen] : met) EXPECT_GE(seen.size(), 4u) << kind;
}

Gradients two(double first, double second) {
  return {at::full({}, 1.0, at::kDouble),
          {{"first", at::full({3}, first, at::kDouble)},
           {"second", at::full({3}, second, at::kDouble)}}};
}

TEST(ExactnessMeasure, SeesAWrongGradientHoweverSmallItIs) {
  EXPECT_NEAR(errors(two(1, 1e-9 * (1 + 1e-6)), two(1, 1e-9))[2], 1e-6, 1e-9);
}

TEST(ExactnessMeasure, MeasuresTrueZerosAgainstTheLargestNorm) {
  EXPECT_NEAR(errors(two(1, 3e-17), two(1, 1e-17))[2], 2e-17, 1e-18);
}

TEST(ExactnessMeasure, SeesMissingAndInfiniteGradients) {
  Gradients missing = two(1, 1);
  missing.parameters[0].tensor.reset();
  EXPECT_TRUE(std::isinf(errors(missing, two(1, 1))[1]));
  EXPECT_TRUE(std::isinf(errors(two(1, 1), missing)[1]));
  EXPECT_TRUE(std::isinf(errors(two(NAN, 1), two(1, 1))[1]));
  EXPECT_EQ(errors(two(NAN, 1), two(NAN, 1))[1], 0);
}

}  // namespace
}  // namespace infinitybatch::testing
