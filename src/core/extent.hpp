#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <utility>

namespace infinitybatch {

/// Of a strided tensor's storage: the bytes from its first element to behind its last one; an empty
/// range for a tensor without elements.
std::pair<int64_t, int64_t> extent_of(const at::Tensor& tensor);

}  // namespace infinitybatch
