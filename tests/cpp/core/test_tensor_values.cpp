// Tensors of every kind: which storages they are in, and copies that are compared and put back.
#include "core/tensor_values.hpp"

#include "core/bits.hpp"
#include "core/tensor_parts.hpp"

#include <ATen/Functions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <c10/core/GradMode.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {
namespace {

struct Kind {
  std::string name;
  std::function<at::Tensor(double)> make;  ///< of numbers near this one
  size_t parts = 1;
};

at::Tensor numbers(double near) {
  return at::linspace(near, near + 1, 12, at::kDouble).view({4, 3});
}

at::Tensor square(double near) {
  return at::linspace(near, near + 1, 16, at::kDouble).view({4, 4}).tril();
}

std::vector<Kind> kinds() {
  return {
      {"plain", numbers},
      {"transposed", [](double near) { return numbers(near).t(); }},
      {"every other", [](double near) { return numbers(near).slice(0, 0, 4, 2); }},
      {"one number", [](double near) { return at::scalar_tensor(near, at::kDouble); }},
      {"empty", [](double) { return at::zeros({0, 3}); }, 1},
      {"expanded", [](double near) { return at::full({1, 1}, near).expand({3, 5}); }},
      {"expanded in one dimension",
       [](double near) { return numbers(near).slice(1, 1, 2).expand({4, 6}); }},
      {"conjugated", [](double near) { return at::complex(numbers(near), numbers(near)).conj(); }},
      {"negated",
       [](double near) { return at::imag(at::complex(numbers(near), numbers(near)).conj()); }},
      {"bool", [](double near) { return numbers(0) > near; }},
      {"half", [](double near) { return numbers(near).to(at::kHalf); }},
      {"COO", [](double near) { return square(near).to_sparse(); }, 2},
      {"CSR", [](double near) { return square(near).to_sparse_csr(); }, 3},
      {"CSC", [](double near) { return square(near).to_sparse_csc(); }, 3},
      {"BSR", [](double near) { return square(near).to_sparse_bsr({2, 2}); }, 3},
      {"nested",
       [](double near) {
         return at::_nested_tensor_from_tensor_list(
             {numbers(near).slice(0, 0, 1).clone(), numbers(near).slice(0, 1).clone()});
       },
       4},
      {"quantized",
       [](double near) {
         return at::quantize_per_tensor(numbers(near).to(at::kFloat), 0.05, 3, at::kQInt8);
       }},
      {"quantized by channel",
       [](double near) {
         return at::quantize_per_channel(numbers(near).to(at::kFloat),
                                         at::linspace(0.05, 0.2, 4, at::kDouble),
                                         at::zeros({4}, at::kLong), 0, at::kQUInt8);
       }},
      {"MKL-DNN", [](double near) { return numbers(near).to(at::kFloat).to_mkldnn(); }, 0},
  };
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return same_form(a, b) && !any_bit_differs(a, b).item<bool>();
}

TEST(TensorValues, PartsAreAllOfATensor) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const TensorParts parts = parts_of(kind.make(0.25));
    EXPECT_EQ(parts.tensors.size(), kind.parts);
    EXPECT_EQ(parts.complete, kind.parts > 0);
    EXPECT_EQ(storages_of(kind.make(0.25)).size(), kind.parts);
    for (const at::Tensor& part : parts.tensors) EXPECT_TRUE(is_plain(part));
  }
  EXPECT_TRUE(storages_of(at::Tensor()).empty());
}

TEST(TensorValues, CopiesAreEqualAndOthersAreNot) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const at::Tensor tensor = kind.make(0.25);
    const at::Tensor copy = value_of(tensor);
    ASSERT_TRUE(can_be_compared(tensor));
    EXPECT_TRUE(same(tensor, copy));
    for (c10::StorageImpl* mine : storages_of(copy)) {
      for (c10::StorageImpl* theirs : storages_of(tensor)) EXPECT_NE(mine, theirs);
    }
    if (kind.name != "empty") EXPECT_FALSE(same(tensor, kind.make(0.5)));
  }
}

TEST(TensorValues, ValuesArePutBackIntoTheSameTensor) {
  const at::NoGradGuard no_grad;
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const at::Tensor tensor = kind.make(0.25);
    const at::Tensor copy = value_of(kind.make(0.5));
    const TensorStorages before = storages_of(tensor);
    const auto version = tensor._version();
    ASSERT_TRUE(put_back(tensor, copy));
    EXPECT_TRUE(same(tensor, kind.make(0.5)));
    EXPECT_EQ(tensor._version(), version);
    EXPECT_EQ(storages_of(tensor), before);  // aliases see it
    ASSERT_TRUE(put_back_counted(tensor, value_of(kind.make(0.25))));
    EXPECT_TRUE(same(tensor, kind.make(0.25)));
    EXPECT_GT(tensor._version(), version);
  }
}

TEST(TensorValues, OtherPlacesAndScalesArePutBack) {
  const at::NoGradGuard no_grad;
  at::Tensor sparse = square(0.25).to_sparse();
  const at::Tensor before = value_of(sparse);
  sparse.add_(at::ones({4, 4}, at::kDouble).to_sparse());
  EXPECT_FALSE(same(sparse, before));
  ASSERT_TRUE(put_back(sparse, before));
  EXPECT_TRUE(same(sparse, before));

  at::Tensor quantized = at::quantize_per_tensor(numbers(0).to(at::kFloat), 0.05, 3, at::kQInt8);
  const at::Tensor kept = value_of(quantized);
  quantized.copy_(at::quantize_per_tensor(numbers(1).to(at::kFloat), 0.1, 0, at::kQInt8));
  ASSERT_TRUE(put_back(quantized, kept));
  EXPECT_EQ(quantized.q_scale(), 0.05);
  EXPECT_TRUE(at::equal(quantized.dequantize(), kept.dequantize()));
}

}  // namespace
}  // namespace infinitybatch
