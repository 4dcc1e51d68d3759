#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>

namespace infinitybatch {

/// Null for tensors without a storage.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

/// Counts writes in place. Inference tensors do not count them: 0.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace infinitybatch
