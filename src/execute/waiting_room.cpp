#include <infinitybatch/execute/waiting_room.hpp>

#include <infinitybatch/core/tensor_memory.hpp>

#include <algorithm>

namespace infinitybatch {

int64_t WaitingRoom::fetch(const std::set<tape::Crossing>& which, bool ahead) {
  int64_t bytes = 0;
  for (const tape::Crossing crossing : which) {
    const auto found = entries_.find(crossing);
    if (found == entries_.end() || !found->second.parked) continue;
    park::Parked& parked = *found->second.parked;
    if (parked.away() && !parked.returning()) bytes += parked.bytes().moves;
    if (ahead) {
      parked.prefetch();
    } else {
      here(found->second);
    }
  }
  return bytes;
}

int64_t WaitingRoom::leave(park::Store& store, const std::set<tape::Crossing>& staying,
                           bool in_background) {
  // Together with its aliases, but with nothing else, so that it comes back alone.
  struct Leaving {
    std::vector<at::Tensor> tensors;
    std::vector<Entry*> entries;
    bool stays = false;
  };
  // In the order of the tape: a micro-batch's story is the same whatever its addresses.
  std::vector<Leaving> storages;
  std::map<const c10::StorageImpl*, size_t> known;
  for (auto& [crossing, entry] : entries_) {
    const bool stays = staying.contains(crossing);
    if (entry.parked && entry.parked->away()) {
      if (!in_background) entry.parked->finish_put();
      // Fetched for a visit that did not use it.
      if (stays || !entry.parked->returning()) continue;
      entry.parked->bring_back();
    }
    entry.parked.reset();
    if (!entry.tensor.defined() || !entry.tensor.has_storage()) continue;
    const auto [place, is_new] =
        known.try_emplace(entry.tensor.storage().unsafeGetStorageImpl(), storages.size());
    if (is_new) storages.emplace_back();
    Leaving& leaving = storages[place->second];
    leaving.tensors.push_back(entry.tensor);
    leaving.entries.push_back(&entry);
    leaving.stays = leaving.stays || stays;
  }
  int64_t bytes = 0;
  for (const Leaving& leaving : storages) {
    if (leaving.stays) continue;
    // The room's own handles and these: no others read them until they are asked for.
    auto parked = std::make_shared<park::Parked>(
        in_background ? store.start_put(leaving.tensors, park::Others::handles)
                      : store.put(leaving.tensors, park::Others::handles));
    if (!parked->away()) continue;
    bytes += parked->bytes().moves;
    for (Entry* entry : leaving.entries) entry->parked = parked;
  }
  return bytes;
}

void WaitingRoom::copy_out(park::Store& store, int32_t giver) {
  std::map<const c10::StorageImpl*, std::vector<tape::Crossing>> storages;
  for (const auto& [crossing, entry] : entries_) {
    if (crossing.giver != giver || entry.parked || !entry.tensor.has_storage()) continue;
    storages[entry.tensor.storage().unsafeGetStorageImpl()].push_back(crossing);
  }
  // In the order of the tape, whatever the addresses.
  for (const auto& [crossing, entry] : entries_) {
    if (crossing.giver != giver || entry.parked || !entry.tensor.has_storage()) continue;
    const auto& aliases = storages.at(entry.tensor.storage().unsafeGetStorageImpl());
    if (aliases.front() != crossing) continue;
    std::vector<at::Tensor> tensors;
    Copying copying;
    for (const tape::Crossing alias : aliases) {
      tensors.push_back(entries_.at(alias).tensor);
      copying.tensors.emplace_back(alias, version_of(tensors.back()));
    }
    copying.parked =
        std::make_shared<park::Parked>(store.start_put(tensors, park::Others::tensors));
    if (copying.parked->away()) copying_.push_back(std::move(copying));
  }
}

void WaitingRoom::finish_leaving(park::Store& store) {
  for (const Copying& copying : std::exchange(copying_, {})) {
    std::set<const c10::TensorImpl*> tensors;
    bool same = true;
    for (const auto& [crossing, version] : copying.tensors) {
      const at::Tensor& tensor = entries_.at(crossing).tensor;
      tensors.insert(tensor.unsafeGetTensorImpl());
      same = same && version_of(tensor) == version;
    }
    const c10::Storage& storage = entries_.at(copying.tensors.front().first).tensor.storage();
    // Beside the tensors themselves the parked place holds it.
    if (!same || storage.use_count() > tensors.size() + 1) continue;
    copying.parked->finish_put();
    for (const auto& [crossing, version] : copying.tensors) {
      entries_.at(crossing).parked = copying.parked;
    }
  }
  park(store);
}

}  // namespace infinitybatch
