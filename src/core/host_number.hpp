#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>

namespace infinitybatch {

/// The value of an ordinary 0-dimensional tensor on the host, read from its memory without
/// dispatching an op; nothing for tensors on devices, subclasses and whatever is more than memory
/// (conjugates, zero tensors, transforms). Complex numbers are not read.
std::optional<double> host_number(const at::Tensor& tensor);

/// How many numbers of a contiguous int64 tensor on the host are other than `value`, counted in its
/// memory; nothing for other tensors, as above.
std::optional<int64_t> host_count_without(const at::Tensor& tensor, int64_t value);

}  // namespace infinitybatch
