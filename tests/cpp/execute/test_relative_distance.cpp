// How far outputs are apart, in hardly more memory than they are in.
#include "execute/relative_distance.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace infinitybatch {
namespace {

constexpr int64_t kMany = 301'000;  // several pieces

at::Tensor numbers() {
  torch::manual_seed(0);
  return at::randn({7, kMany / 7}, at::kDouble);
}

TEST(RelativeDistance, IsFoundWhereverItLies) {
  for (const int64_t row : {0, 3, 6}) {
    for (const int64_t column : {int64_t{0}, int64_t{20'000}, kMany / 7 - 1}) {
      const at::Tensor given = numbers();
      at::Tensor other = given.clone();
      given.index({row, column}).fill_(8.0);
      other.index({row, column}).fill_(6.0);
      EXPECT_DOUBLE_EQ(relative_distance(given, other), 0.25) << row << ", " << column;
      EXPECT_DOUBLE_EQ(relative_distance(given.t(), other.t()), 0.25);
      EXPECT_DOUBLE_EQ(relative_distance(given.t().contiguous(), other.t()), 0.25);
    }
  }
}

TEST(RelativeDistance, OfNumbersFarBelowTheUsualIsByTheUsual) {
  const at::Tensor given = at::full({kMany}, 4.0, at::kDouble);
  at::Tensor other = given.clone();
  given[kMany / 2] = 1e-9;
  other[kMany / 2] = 3e-9;
  EXPECT_NEAR(relative_distance(given, other), 5e-10, 1e-12);
}

TEST(RelativeDistance, NumbersThatAreNoneAreTheSameOrInfinitelyFar) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor given = numbers();
  given[5][30'000] = nan;
  EXPECT_EQ(relative_distance(given, given.clone()), 0);
  EXPECT_TRUE(std::isinf(relative_distance(given, numbers())));
  EXPECT_TRUE(std::isinf(relative_distance(numbers(), given)));
}

TEST(RelativeDistance, OfChoicesIsWhetherMoreThanAHundredthDiffer) {
  const at::Tensor given = at::zeros({kMany}, at::kLong);
  at::Tensor other = given.clone();
  other.slice(0, 0, kMany / 101) = 1;
  EXPECT_EQ(relative_distance(given, other), 0);
  other.slice(0, 0, kMany / 99) = 1;
  EXPECT_TRUE(std::isinf(relative_distance(given, other)));
}

TEST(RelativeDistance, TakesLittleBesideWhatIsCompared) {
  const at::Tensor given = at::rand({64, 1 << 14});  // 4 MiB
  const at::Tensor other = given.clone();
  const int64_t live = memory::stats(at::kCPU).live;
  const memory::PeakScope peak(at::kCPU);
  relative_distance(given, other);
  EXPECT_LE(peak.peak() - live, int64_t{2} << 20);
}

}  // namespace
}  // namespace infinitybatch
