#include <infinitybatch/execute/waiting_room.hpp>

#include <vector>

namespace infinitybatch {

void WaitingRoom::park(park::Store& store) {
  // Together with its aliases, but with nothing else, so that it comes back alone.
  struct Leaving {
    std::vector<at::Tensor> tensors;
    std::vector<Entry*> entries;
  };
  std::map<const c10::StorageImpl*, Leaving> storages;
  for (auto& [crossing, entry] : entries_) {
    if (entry.parked && entry.parked->away()) continue;
    entry.parked.reset();
    if (!entry.tensor.defined() || !entry.tensor.has_storage()) continue;
    Leaving& leaving = storages[entry.tensor.storage().unsafeGetStorageImpl()];
    leaving.tensors.push_back(entry.tensor);
    leaving.entries.push_back(&entry);
  }
  for (const auto& [storage, leaving] : storages) {
    // The room's own handles and these: no others read them until they are asked for.
    auto parked = std::make_shared<park::Parked>(store.put(leaving.tensors, park::Others::handles));
    if (!parked->away()) continue;
    for (Entry* entry : leaving.entries) entry->parked = parked;
  }
}

}  // namespace infinitybatch
