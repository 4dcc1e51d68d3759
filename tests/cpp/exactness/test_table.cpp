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
  EXPECT_TRUE(std::isinf(errors(two(1, NAN), two(1, 1))[2])) << "in a later parameter";
  EXPECT_TRUE(std::isinf(errors(two(-INFINITY, 1), two(INFINITY, 1))[1])) << "of the other sign";
  EXPECT_FALSE(excess_in_double(two(1, NAN), two(1, 1), two(1, NAN)).empty());
}

TEST(ExactnessMeasure, SeesParametersThatAreMissingOrCalledOtherwise) {
  Gradients fewer = two(1, 1), renamed = two(1, 1);
  fewer.parameters.pop_back();
  renamed.parameters[1].name = "third";
  EXPECT_TRUE(std::isinf(errors(fewer, two(1, 1))[2]));
  EXPECT_TRUE(std::isinf(errors(two(1, 1), fewer)[0]));
  EXPECT_TRUE(std::isinf(errors(renamed, two(1, 1))[2]));
  EXPECT_FALSE(excess_in_double(fewer, two(1, 1), two(1, 1)).empty());
}

TEST(ExactnessMeasure, ComparesIntegersExactly) {
  Gradients counted = two(1, 1);
  counted.parameters[1].tensor = at::full({}, 7, at::kLong);
  Gradients other = counted;
  other.parameters[1].tensor = at::full({}, 8, at::kLong);
  EXPECT_EQ(errors(counted, counted)[2], 0);
  EXPECT_GT(errors(other, counted)[2], 0.1);
  EXPECT_TRUE(std::isinf(errors(two(1, 7), counted)[2])) << "of another shape and type";
}

// What native's own rounding allows in float32 hides no fault, in any family.
class FaultsInSingle : public ::testing::TestWithParam<const char*> {};

Gradients divided(Gradients values, double divisor) {
  for (NamedParameter& parameter : values.parameters) {
    if (parameter.tensor.defined()) parameter.tensor = parameter.tensor / divisor;
  }
  return values;
}

TEST_P(FaultsInSingle, AreSeen) {
  constexpr int64_t kSamples = 7;
  const CriterionCase& criterion = criterion_named(GetParam());
  for (const Family& family : families()) {
    if (family.autocast) continue;  // bfloat16 has three digits
    SCOPED_TRACE(family.name);
    const auto subject = make_subject(family, criterion, at::kFloat, 11);
    const auto exact = make_subject(family, criterion, at::kDouble, 11);
    const Data data = make_data(family, criterion, kSamples, at::kFloat, 23);
    const Data wide = make_data(family, criterion, kSamples, at::kDouble, 23);
    const Gradients reference = native(*exact, criterion, wide, false);
    std::vector<Gradients> known;  // the same ways are asked for again and again
    const auto excess = [&](const Gradients& found) {
      size_t asked = 0;
      return excess_in_single(found, reference, at::kFloat, kSamples, [&](const Way& way) {
        if (asked == known.size()) known.push_back(native(*subject, criterion, data, false, way));
        return known[asked++];
      });
    };
    const auto with_samples = [&](const std::vector<int64_t>& samples) {
      return native(*subject, criterion, ordered(data, samples), false);
    };
    const Gradients right = native(*subject, criterion, data, false);
    EXPECT_TRUE(excess(right).empty());
    EXPECT_FALSE(excess(divided(right, 1 + 1e-5)).empty()) << "a denominator a touch too large";
    EXPECT_FALSE(excess(with_samples({0, 1, 2, 3, 4, 5})).empty()) << "a sample left out";
    EXPECT_FALSE(excess(with_samples({0, 1, 2, 3, 4, 5, 5})).empty()) << "a sample taken twice";
  }
}

INSTANTIATE_TEST_SUITE_P(ExactnessMeasure, FaultsInSingle,
                         ::testing::Values("mse_loss/plain_mean", "cross_entropy/indices_sum",
                                           "ctc_loss/ragged_mean"),
                         [](const auto& row) {
                           std::string name = row.param;
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name;
                         });

}  // namespace
}  // namespace infinitybatch::testing
