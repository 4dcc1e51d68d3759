#include "offload/movable.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#include <unordered_map>
#include <unordered_set>

namespace infinitybatch::offload {
namespace {

/// Whether the memory is one block of the device's own allocator, which nobody else owns: a new
/// block from there can take its place.
bool owns_memory(c10::StorageImpl& storage) {
  // Reading the pointer of a fake tensor's storage throws; the plain reference does not.
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  const c10::Allocator* allocator = c10::GetAllocator(storage.device_type());
  return data.get() != nullptr && data.get_deleter() != nullptr &&
         data.get_deleter() == allocator->raw_deleter();
}

/// The bytes of a storage on the device, 0 where there is nothing to move.
int64_t bytes_on(c10::StorageImpl* storage, c10::Device device) {
  if (storage == nullptr || storage->device() != device) return 0;
  const auto bytes = storage->sym_nbytes().maybe_as_int();
  return bytes && storage->_mutable_data_ptr_no_checks().get() != nullptr ? *bytes : 0;
}

/// A tensor that is its memory, seen by sizes and strides.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kMore({c10::DispatchKey::Python, c10::DispatchKey::NestedTensor,
                                       c10::DispatchKey::Fake, c10::DispatchKey::FuncTorchBatched,
                                       c10::DispatchKey::FuncTorchGradWrapper});
  return !tensor.unsafeGetTensorImpl()->key_set().has_any(kMore);
}

/// What is known of one storage among the given tensors.
struct Seen {
  c10::Storage const* storage = nullptr;
  size_t tensors = 0;           // different ones that lie on it
  bool held_elsewhere = false;  // one of them has handles that were not given
  bool plain = true;
};

}  // namespace

MovableStorages movable_storages(at::ArrayRef<at::Tensor> tensors, Others others,
                                 c10::Device device) {
  std::unordered_map<const c10::TensorImpl*, size_t> handles;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) ++handles[tensor.unsafeGetTensorImpl()];
  }
  std::vector<Seen> seen;
  std::unordered_map<const c10::StorageImpl*, size_t> places;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) continue;
    const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (bytes_on(storage.unsafeGetStorageImpl(), device) == 0) continue;
    const auto handle = handles.find(tensor.unsafeGetTensorImpl());
    if (handle->second == 0) continue;  // a tensor that was given twice
    const auto [place, is_new] = places.emplace(storage.unsafeGetStorageImpl(), seen.size());
    if (is_new) seen.push_back({&storage});
    Seen& entry = seen[place->second];
    ++entry.tensors;
    entry.held_elsewhere |= tensor.use_count() > handle->second;
    entry.plain &= is_plain(tensor);
    handle->second = 0;
  }
  MovableStorages result;
  for (const Seen& entry : seen) {
    const bool shared = entry.storage->use_count() > entry.tensors;
    const bool held =
        (others != Others::tensors && shared) || (others == Others::none && entry.held_elsewhere);
    result.add(*entry.storage, entry.plain, held);
  }
  return result;
}

MovableStorages movable_storages(at::ArrayRef<c10::Storage> storages, c10::Device device) {
  MovableStorages result;
  std::unordered_set<const c10::StorageImpl*> seen;
  for (const c10::Storage& storage : storages) {
    if (bytes_on(storage.unsafeGetStorageImpl(), device) == 0) continue;
    if (seen.insert(storage.unsafeGetStorageImpl()).second) result.add(storage, true, false);
  }
  return result;
}

void MovableStorages::add(const c10::Storage& storage, bool plain, bool held) {
  const auto size = static_cast<int64_t>(storage.nbytes());
  if (!plain || !owns_memory(*storage.unsafeGetStorageImpl())) {
    bytes.not_ours += size;
  } else if (held) {
    bytes.held_by_others += size;
  } else {
    bytes.moves += size;
    storages.push_back(storage);
  }
}

}  // namespace infinitybatch::offload
