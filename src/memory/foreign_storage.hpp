#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace infinitybatch::memory {

/// Counts, while it lives, storages on the CPU that torch allocated before this library was loaded:
/// without it a budget would forget them. Each storage counts once in the process, however many
/// tensors and objects of this class name it, and even if it is freed meanwhile. Sparse tensors
/// count by their indices and values; tensors without a storage, lazy copies and gradients that are
/// not in the list are passed over. Storages that torch's CPU allocator did not make (NumPy's,
/// mapped files) are not the device's and are left out; on accelerators nothing is needed, their
/// allocators count from the start.
class ForeignStorages {
 public:
  explicit ForeignStorages(const std::vector<at::Tensor>& tensors);
  ~ForeignStorages();
  ForeignStorages(const ForeignStorages&) = delete;
  ForeignStorages& operator=(const ForeignStorages&) = delete;

  /// What this object found: the bytes of its storages, those included that another one counts.
  int64_t bytes() const noexcept { return bytes_; }

 private:
  class Held;

  void add(const at::Tensor& tensor);
  void add_storage(const at::Tensor& tensor);

  std::unordered_map<const c10::StorageImpl*, std::unique_ptr<Held>> held_;
  int64_t bytes_ = 0;
};

}  // namespace infinitybatch::memory
