#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Where a forward in Python can leave tensors that are no output: an attribute of a module, an
/// item of a dict there, or a list; the same in what hooks hold.
struct LeftPlace {
  std::string name;  ///< "layers.0.features", "hook of layers.0['x']"
  bool list = false;
  /// What lies there: one tensor, or the items of a list; undefined where one is no tensor.
  std::vector<at::Tensor> tensors;
  std::function<void(size_t index, const at::Tensor& tensor)> put;
  /// Of a list: takes these items out, given in ascending order.
  std::function<void(const std::vector<size_t>& indices)> erase;
};

}  // namespace infinitybatch
