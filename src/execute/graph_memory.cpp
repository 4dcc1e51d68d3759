#include "execute/graph_memory.hpp"

#include "core/tensor_parts.hpp"
#include "core/torch_compat.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {

GraphMemory::~GraphMemory() {
  for (offload::Offloaded& offloaded : offloaded_) {
    try {
      offloaded.bring_back();
    } catch (...) {  // no room, or no disk: who reads it is told
    }
  }
}

void GraphMemory::know(const Batch& inputs) {
  for (const Leaf& leaf : inputs.leaves()) {
    const at::Tensor& tensor = leaf.tensor;
    if (!tensor.defined()) continue;
    // Rows that were copied to the device, or made on demand: nobody else has them.
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const bool in_python = impl.pyobj_slot()->load_pyobj() != nullptr;
    const bool ours = tensor.use_count() == (in_python ? 2 : 1) &&
                      compat::python_references(*impl.pyobj_slot()) == 0;
    const bool alone = is_plain(tensor) && tensor.storage().use_count() == 1;
    meet(tensor, ours && alone);
  }
}

Batch GraphMemory::watch(const std::function<Batch()>& forward) {
  Batch outputs;
  {
    const tape::OpBus::Scope listening(*this, {.results = true});
    outputs = forward();
  }
  errors_.rethrow();
  return outputs;
}

std::unique_ptr<tape::OpContext> GraphMemory::begin(const tape::SeenOp& op) noexcept {
  ++depth_;
  bool known = true;
  errors_.guard([&] {
    for (const c10::IValue& input : op.inputs()) known = meet(input, /*made=*/false) && known;
  });
  return known ? nullptr : std::make_unique<tape::OpContext>();
}

void GraphMemory::end(const tape::SeenOp& op, tape::OpContext* context) noexcept {
  // What comes of memory that nobody knows may lie in it.
  const bool made = context == nullptr;
  errors_.guard([&] {
    for (const c10::IValue& output : op.outputs()) meet(output, made);
  });
  --depth_;
}

bool GraphMemory::meet(const c10::IValue& value, bool made) {
  bool known = true;
  if (value.isTensor()) {
    known = meet(value.toTensor(), made);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) known = meet(tensor, made) && known;
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) known = meet(element.toTensor(), made) && known;
    }
  }
  return known;
}

bool GraphMemory::meet(const at::Tensor& tensor, bool made) {
  if (!tensor.defined()) return true;
  if (has_one_storage(tensor)) {
    meet_part(tensor, made);
    return true;
  }
  const TensorParts parts = parts_of(tensor);
  for (const at::Tensor& part : parts.tensors) {
    Memory* memory = meet_part(part, made);
    if (memory == nullptr) continue;
    // Whoever holds the whole may read its parts.
    const c10::TensorImpl* whole = tensor.unsafeGetTensorImpl();
    const bool is_there =
        std::any_of(memory->tensors.begin(), memory->tensors.end(),
                    [&](const auto& weak) { return weak._unsafe_get_target() == whole; });
    if (!is_there) memory->tensors.emplace_back(tensor.getIntrusivePtr());
  }
  return parts.complete;
}

/// An op's results that lie in memory which was there before are views of it. Memory that a kernel
/// takes for its result may be given to an op inside of it before it is a result.
GraphMemory::Memory* GraphMemory::meet_part(const at::Tensor& tensor, bool made) {
  const c10::Storage& holder = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const c10::StorageImpl* storage = holder.unsafeGetStorageImpl();
  if (storage == nullptr) return nullptr;
  const auto [place, is_new] = at_.try_emplace(storage, memories_.size());
  if (is_new) {
    memories_.push_back({holder.getWeakStorageImpl(), {}, made, depth_, storage->resizable()});
  }
  Memory& memory = memories_[place->second];
  memory.made = memory.made || (made && depth_ < memory.depth);
  // A tensor can be given other memory.
  const auto [known, is_unknown] = tensors_.try_emplace(tensor.unsafeGetTensorImpl(), SIZE_MAX);
  if (std::exchange(known->second, place->second) != place->second) {
    memory.tensors.emplace_back(tensor.getIntrusivePtr());
  }
  return &memory;
}

/// Whether Python holds it, or one of the tensors that lie in it: it may be read at any time.
bool GraphMemory::held(const Memory& memory, const c10::StorageImpl& storage) {
  if (memory.resizable && !storage.resizable()) return true;  // NumPy has it
  if (compat::python_references(*storage.pyobj_slot()) > 0) return true;
  for (const auto& weak : memory.tensors) {
    const auto tensor = weak.lock();
    if (tensor && compat::python_references(*tensor->pyobj_slot()) > 0) return true;
  }
  return false;
}

int64_t GraphMemory::leave(offload::Store& store, const Storages& staying, bool in_background) {
  std::vector<c10::Storage> storages;
  std::vector<Memory*> leaving;
  for (Memory& memory : memories_) {
    if (!memory.made || memory.gone) continue;
    auto storage = memory.storage.lock();
    if (!storage || staying.contains(storage.get()) || held(memory, *storage)) continue;
    storages.emplace_back(std::move(storage));
    leaving.push_back(&memory);
  }
  offload::Offloaded offloaded = in_background ? store.start_put(storages) : store.put(storages);
  for (Memory* memory : leaving) memory->gone = true;
  const int64_t bytes = offloaded.bytes().moves;
  offloaded_.push_back(std::move(offloaded));
  return bytes;
}

int64_t GraphMemory::offload(offload::Store& store, const Storages& staying) {
  for (offload::Offloaded& offloaded : offloaded_) offloaded.finish_put();
  return leave(store, staying, /*in_background=*/false);
}

int64_t GraphMemory::fetch(bool ahead) {
  int64_t bytes = 0;
  for (offload::Offloaded& offloaded : offloaded_) {
    if (offloaded.away() && !offloaded.returning()) bytes += offloaded.bytes().moves;
    if (ahead) {
      offloaded.prefetch();
    } else {
      offloaded.bring_back();
    }
  }
  return bytes;
}

GraphBytes GraphMemory::bytes() const {
  GraphBytes bytes;
  for (const offload::Offloaded& offloaded : offloaded_) {
    bytes.offloaded += offloaded.bytes().moves;
    bytes.stayed += offloaded.bytes().stays();
  }
  for (const Memory& memory : memories_) {
    if (!memory.made || memory.gone) continue;
    if (const auto storage = memory.storage.lock()) {
      bytes.stayed += compat::bytes_in(*storage);
    }
  }
  return bytes;
}

GraphMemory::Storages memory_of(const Batch& tensors) {
  GraphMemory::Storages memory;
  for (const Leaf& leaf : tensors.leaves()) {
    for (const c10::StorageImpl* storage : storages_of(leaf.tensor)) memory.insert(storage);
  }
  return memory;
}

int64_t offload_graph(GraphMemory& memory, offload::Store& store, Batch& graph, Batch& seen) {
  for (Leaf& leaf : graph.leaves()) {
    if (leaf.tensor.defined() && !leaf.tensor.requires_grad()) leaf.tensor.reset();
  }
  const int64_t unseen = memory.offload(store, memory_of(seen));
  const at::NoGradGuard no_grad;
  for (Leaf& leaf : seen.leaves()) {
    at::Tensor& tensor = leaf.tensor;
    if (!tensor.defined() || !is_plain(tensor) || tensor.use_count() > 1) continue;
    if (tensor.storage().use_count() > 1) tensor = tensor.clone();
  }
  return unseen + memory.offload(store, memory_of(seen));
}

}  // namespace infinitybatch
