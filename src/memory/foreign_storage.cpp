#include "memory/foreign_storage.hpp"

#include "core/tensor_parts.hpp"
#include "memory/cpu_accounting.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>

namespace infinitybatch::memory {
namespace {

struct Counted {
  int64_t bytes = 0;
  int64_t holders = 0;
};

/// The foreign storages that count now, in the whole process.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Counted> storages;

  static Registry& instance() {
    static auto& registry = *new Registry;  // outlives static holders
    return registry;
  }
};

}  // namespace

/// One object's part in a storage that counts.
class ForeignStorages::Held {
 public:
  Held(const c10::Storage& storage, int64_t bytes)
      : key_(storage.unsafeGetStorageImpl()), storage_(storage.getWeakStorageImpl()) {
    Registry& registry = Registry::instance();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    Counted& counted = registry.storages[key_];
    if (++counted.holders > 1) return;
    counted.bytes = bytes;
    auto& live = CpuAccounting::counters().live;
    const int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    CpuAccounting::raise_process_peak(now);
    CpuAccounting::raise_scope_peak(CpuAccounting::thread(), now);
  }

  ~Held() {
    Registry& registry = Registry::instance();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    const auto found = registry.storages.find(key_);
    if (--found->second.holders > 0) return;
    CpuAccounting::release(found->second.bytes);
    registry.storages.erase(found);
  }

  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  const c10::StorageImpl* key_;
  // Weak: the storage may be freed as usual, but its address is not given to another one meanwhile.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

ForeignStorages::ForeignStorages(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) add(tensor);
}

ForeignStorages::~ForeignStorages() = default;

void ForeignStorages::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return;
  for (const at::Tensor& part : parts_of(tensor).tensors) add_storage(part);
}

void ForeignStorages::add_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl == nullptr || storage.device_type() != c10::DeviceType::CPU) return;
  // Reading the pointer of a fake tensor's storage throws; the plain reference does not.
  const c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr || data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter()) {
    return;
  }
  if (held_.count(impl) != 0) return;
  const auto bytes = static_cast<int64_t>(impl->nbytes());
  held_.emplace(impl, std::make_unique<Held>(storage, bytes));
  bytes_ += bytes;
}

}  // namespace infinitybatch::memory
