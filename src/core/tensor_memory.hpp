#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>

namespace infinitybatch {

/// The one storage that a tensor is in; null for one that has none, or several (sparse): those are
/// in `core/tensor_parts.hpp`.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/// Counts writes in place. Inference tensors do not count them: 0.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace infinitybatch
