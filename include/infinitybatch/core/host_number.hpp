#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>

namespace infinitybatch {

/// The value of an ordinary 0-dimensional tensor on the host, read from its memory without
/// dispatching an op; nothing for tensors on devices, subclasses and whatever is more than memory
/// (conjugates, zero tensors, transforms). Complex numbers are not read.
std::optional<double> host_number(const at::Tensor& tensor);

}  // namespace infinitybatch
