#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <functional>

namespace infinitybatch::autograd {

/// A node of the graph that multiplies rows by a weight, as `linear` builds it: the gradient of the
/// weight is a product of two matrices.
struct WeightProduct {
  torch::autograd::Node* node = nullptr;
  uint32_t edge = 0;                     ///< of `node`, towards the weight
  bool transposed = false;               ///< rows are multiplied by the transposed weight
  torch::autograd::Node* end = nullptr;  ///< where the weight's gradient goes

  explicit operator bool() const { return node != nullptr; }

  /// Of `node`, unless hooks would see the weight's gradient; empty where it is none.
  static WeightProduct of(torch::autograd::Node& node);

  /// From now on `node` computes no gradient of the weight, and `take` gets its two factors, in
  /// this order. For graphs that run backward once.
  void give_factors(std::function<void(const at::Tensor&, const at::Tensor&)> take) const;
};

}  // namespace infinitybatch::autograd
