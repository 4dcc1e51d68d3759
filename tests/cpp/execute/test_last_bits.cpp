// What stands for another rounding: whole numbers stay, and everything comes back.
#include "execute/last_bits.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

const auto kTypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};

at::Tensor numbers(at::ScalarType type) {
  torch::manual_seed(0);
  return at::randn({4000}, at::kDouble).to(type);
}

/// Small ids, counts, zeros of both signs, pixels, what is no number.
at::Tensor whole(at::ScalarType type) {
  const at::Tensor ids = at::arange(-20, 21, at::kDouble);
  const at::Tensor pixels = at::arange(0, 256, at::kDouble);
  const at::Tensor others =
      at::tensor({-0.0, std::numeric_limits<double>::infinity(), std::nan("")}, at::kDouble);
  return at::cat({ids, pixels, others}).to(type);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto words = [](const at::Tensor& tensor) { return tensor.view(at::kByte); };
  return at::equal(words(a), words(b));
}

TEST(LastBits, AreTurnedAndTurnedBack) {
  for (const at::ScalarType type : kTypes) {
    for (const bool coarse : {false, true}) {
      const at::Tensor before = at::cat({numbers(type), whole(type)});
      const at::Tensor now = before.clone();
      turn_last_bits(now, 7, coarse);
      const double turned = now.ne(before).to(at::kDouble).mean().item<double>();
      EXPECT_GT(turned, 0.3) << type;
      EXPECT_LT(turned, 0.7) << type;
      EXPECT_TRUE(at::allclose(now, before, 1e-2, 0, /*equal_nan=*/true));
      turn_last_bits(now, 7, coarse);
      EXPECT_TRUE(same_bits(now, before)) << type;
    }
  }
}

TEST(LastBits, OfWholeNumbersStayAndNoneAreMade) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor before = whole(type);
    for (uint32_t which = 1; which < 9; ++which) {
      const at::Tensor now = before.clone();
      turn_last_bits(now, which, which % 2 == 0);
      round_otherwise(now, which);
      EXPECT_TRUE(same_bits(now, before)) << type;
    }
    EXPECT_TRUE(are_whole(at::arange(9).to(type)));
    EXPECT_FALSE(are_whole(at::full({1}, 0.5, type)));
  }
  // Next to 3 lie numbers that are not.
  const at::Tensor near = at::full({64}, 3.0).to(at::kDouble).add(4.5e-16);
  const at::Tensor before = near.clone();
  ASSERT_TRUE(before.ne(3).all().item<bool>());
  turn_last_bits(near, 1, /*coarse=*/false);
  EXPECT_TRUE(near.ne(3).all().item<bool>());
}

TEST(LastBits, AreRoundedByValue) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor before = numbers(type);
    const at::Tensor now = before.clone();
    round_otherwise(now, 1);
    const double moved = now.ne(before).to(at::kDouble).mean().item<double>();
    EXPECT_GT(moved, 0.3) << type;
    const at::Tensor other = before.clone();
    round_otherwise(other, 2);
    EXPECT_FALSE(same_bits(other, now)) << type;
    const at::Tensor turned = before.flip(0);
    round_otherwise(turned, 1);
    EXPECT_TRUE(same_bits(turned.flip(0), now)) << type;
  }
}

TEST(LastBits, OfNumbersOfAFewBitsStay) {
  const at::Tensor before = at::arange(1, 64, at::kDouble) / 16;
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    const at::Tensor now = before.to(type);
    for (uint32_t which = 1; which < 9; ++which) round_otherwise(now, which);
    EXPECT_TRUE(same_bits(now, before.to(type)));
  }
}

}  // namespace
}  // namespace infinitybatch
