#pragma once

#include "offload/store.hpp"

#include <c10/core/StorageImpl.h>

#include <vector>

namespace infinitybatch::offload {

/// The storages among those of some tensors that may move away from a device.
struct MovableStorages {
  Movable bytes;
  std::vector<c10::Storage> storages;  ///< those that move, in the order of the tensors

  void add(const c10::Storage& storage, bool plain, bool held);
};

MovableStorages movable_storages(at::ArrayRef<at::Tensor> tensors, Others others,
                                 c10::Device device);
/// The same for storages for whose holders the caller answers.
MovableStorages movable_storages(at::ArrayRef<c10::Storage> storages, c10::Device device);

}  // namespace infinitybatch::offload
