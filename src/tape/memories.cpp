#include "tape/memories.hpp"

#include "tape/provenance.hpp"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

namespace infinitybatch::tape {

Memory* Memories::find(const at::Tensor& tensor) {
  const auto found = memories_.find(storage_of(tensor));
  return found == memories_.end() ? nullptr : found->second;
}

Memory* Memories::add(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr) return nullptr;
  Memory*& memory = memories_[storage];
  if (memory == nullptr) {
    memory = &all_.emplace_back(tensor.storage().getWeakStorageImpl());
    memory->resizable = storage->resizable();
    memory->bytes = compat::bytes_in(*storage);
  }
  return memory;
}

bool Memories::inside_another(const at::Tensor& tensor) const {
  const c10::StorageImpl* storage = storage_of(tensor);
  // What an allocator gave overlaps nothing; foreign memory is given with its address alone.
  if (storage == nullptr || (storage->resizable() && storage->allocator() != nullptr)) return false;
  const auto* address = static_cast<const char*>(storage->data());
  if (address == nullptr) return false;
  for (const auto& [other, memory] : memories_) {
    if (other == storage || !memory->made_here || memory->storage.expired()) continue;
    const auto* begin = static_cast<const char*>(other->data());
    if (begin != nullptr && address >= begin && address < begin + compat::bytes_in(*other))
      return true;
  }
  return false;
}

void Memories::number(std::vector<uint32_t>& numbers, std::vector<int64_t>& bytes) const {
  uint32_t next = 0;
  for (const Memory& memory : all_) {
    for (const ValueId value : memory.values) numbers[value] = next;
    bytes.push_back(memory.bytes);
    ++next;
  }
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), 0, {size}, {1});
}

bool Memories::exported(const Memory& memory, const at::Tensor& tensor) {
  return memory.made_here && memory.resizable && !storage_of(tensor)->resizable();
}

}  // namespace infinitybatch::tape
