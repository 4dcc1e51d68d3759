#pragma once

#include <ATen/core/TensorBody.h>

#include <vector>

namespace infinitybatch::memory {

/// Counts, while it lives, storages on the CPU that torch allocated before this library was loaded:
/// without it a budget would forget them. Each storage counts once. Storages that torch's CPU
/// allocator did not make (NumPy's, mapped files) are not the device's and are left out; on
/// accelerators nothing is needed, their allocators count from the start.
class ForeignStorages {
 public:
  explicit ForeignStorages(const std::vector<at::Tensor>& tensors);
  ~ForeignStorages();
  ForeignStorages(const ForeignStorages&) = delete;
  ForeignStorages& operator=(const ForeignStorages&) = delete;
  int64_t bytes() const noexcept { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace infinitybatch::memory
