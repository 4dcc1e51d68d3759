// Many buffers copied and compared in few kernels: bits, forms and kinds of tensors.
#include "core/small_tensors.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace infinitybatch {
namespace {

std::vector<at::Tensor> of_every_kind() {
  return {at::rand({4}),
          at::full({}, 7, at::kLong),
          at::rand({2, 3}),
          at::zeros({0}),
          at::full({3}, true, at::kBool),
          at::rand({2, 2}, at::kComplexDouble).conj(),
          at::rand({6, 4}).t().slice(0, 0, 4, 2),
          at::rand({1 << 15}),  // too large to lie beside others
          at::full({2}, NAN),
          at::rand({3}, at::kHalf)};
}

TEST(SmallTensors, AreCopiedBitForBit) {
  const std::vector<at::Tensor> tensors = of_every_kind();
  const std::vector<at::Tensor> copies = copies_of(tensors);
  ASSERT_EQ(copies.size(), tensors.size());
  BitDifferences differences;
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(copies[i].sizes(), tensors[i].sizes());
    EXPECT_EQ(copies[i].scalar_type(), tensors[i].scalar_type());
    EXPECT_FALSE(copies[i].is_alias_of(tensors[i]));
    differences.note(i, tensors[i], copies[i]);
  }
  EXPECT_TRUE(differences.take().empty());
}

TEST(SmallTensors, AreWrittenWithANewVersion) {
  const std::vector<at::Tensor> tensors = of_every_kind();
  std::vector<at::Tensor> values = copies_of(tensors);
  for (at::Tensor& value : values) value = at::zeros_like(value);
  const auto before = tensors[0]._version();
  copy_into(tensors, values);
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(tensors[i].equal(values[i])) << i;
  EXPECT_GT(tensors[0]._version(), before);
}

TEST(SmallTensors, DifferByOneBitInOneOfManyComparisons) {
  for (size_t which = 0; which < of_every_kind().size(); ++which) {
    const std::vector<at::Tensor> tensors = of_every_kind();
    if (tensors[which].numel() == 0) continue;
    BitDifferences differences;
    std::vector<at::Tensor> now = copies_of(tensors);
    for (int time = 0; time < 3; ++time) {
      if (time == 1) now[which] = now[which].clone().fill_(time == 1 ? 1.5 : 0.0);
      for (size_t i = 0; i < tensors.size(); ++i) differences.note(i, tensors[i], now[i]);
      differences.flush();
      if (time == 1) now[which] = tensors[which];
    }
    const bool same = tensors[which].scalar_type() == at::kBool;  // 1.5 is true
    EXPECT_EQ(differences.take(), same ? std::set<size_t>{} : std::set<size_t>{which});
  }
}

TEST(SmallTensors, OfAnotherFormDiffer) {
  BitDifferences differences;
  differences.note(0, at::zeros({2}), at::zeros({3}));
  differences.note(1, at::zeros({2}), at::zeros({2}, at::kDouble));
  differences.note(2, at::zeros({2}), at::zeros({2}));
  differences.note(3, at::zeros({2}), at::full({2}, -0.0));
  EXPECT_EQ(differences.take(), (std::set<size_t>{0, 1, 3}));
  differences.clear();
  EXPECT_TRUE(differences.take().empty());
}

TEST(SmallTensors, AreComparedOnceTheirNameComesAgain) {
  const at::Tensor before = at::zeros({2});
  for (const int which : {0, 1}) {  // of the two that is another
    BitDifferences differences;
    differences.note(0, before, which == 0 ? at::ones({2}) : before);
    differences.note(0, before, which == 1 ? at::ones({2}) : before);
    EXPECT_EQ(differences.take(), std::set<size_t>{0});
  }
}

}  // namespace
}  // namespace infinitybatch
