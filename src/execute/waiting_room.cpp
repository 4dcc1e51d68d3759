#include <infinitybatch/execute/waiting_room.hpp>

#include <vector>

namespace infinitybatch {

void WaitingRoom::park(park::Store& store) {
  // Together with its aliases, but with nothing else, so that it comes back alone.
  struct Leaving {
    std::vector<at::Tensor> tensors;
    std::vector<Entry*> entries;
  };
  // In the order of the tape: a micro-batch's story is the same whatever its addresses.
  std::vector<Leaving> storages;
  std::map<const c10::StorageImpl*, size_t> known;
  for (auto& [crossing, entry] : entries_) {
    if (entry.parked && entry.parked->away()) continue;
    entry.parked.reset();
    if (!entry.tensor.defined() || !entry.tensor.has_storage()) continue;
    const auto [place, is_new] =
        known.try_emplace(entry.tensor.storage().unsafeGetStorageImpl(), storages.size());
    if (is_new) storages.emplace_back();
    Leaving& leaving = storages[place->second];
    leaving.tensors.push_back(entry.tensor);
    leaving.entries.push_back(&entry);
  }
  for (const Leaving& leaving : storages) {
    // The room's own handles and these: no others read them until they are asked for.
    auto parked = std::make_shared<park::Parked>(store.put(leaving.tensors, park::Others::handles));
    if (!parked->away()) continue;
    for (Entry* entry : leaving.entries) entry->parked = parked;
  }
}

}  // namespace infinitybatch
