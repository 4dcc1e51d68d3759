#include "execute/waiting_room.hpp"

#include "core/tensor_memory.hpp"

#include <algorithm>

namespace infinitybatch {

int64_t WaitingRoom::fetch(const std::set<tape::Crossing>& which, bool ahead) {
  int64_t bytes = 0;
  for (const tape::Crossing crossing : which) {
    const auto found = entries_.find(crossing);
    if (found == entries_.end() || !found->second.offloaded) continue;
    offload::Offloaded& offloaded = *found->second.offloaded;
    if (offloaded.away() && !offloaded.returning()) bytes += offloaded.bytes().moves;
    if (ahead) {
      offloaded.prefetch();
    } else {
      here(found->second);
    }
  }
  return bytes;
}

int64_t WaitingRoom::leave(offload::Store& store, const std::set<tape::Crossing>& staying,
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
    if (entry.offloaded && entry.offloaded->away()) {
      if (!in_background) entry.offloaded->finish_put();
      // Fetched for a visit that did not use it.
      if (stays || !entry.offloaded->returning()) continue;
      entry.offloaded->bring_back();
    }
    entry.offloaded.reset();
    if (storage_of(entry.tensor) == nullptr) continue;
    const auto [place, is_new] = known.try_emplace(storage_of(entry.tensor), storages.size());
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
    auto offloaded = std::make_shared<offload::Offloaded>(
        in_background ? store.start_put(leaving.tensors, offload::Others::handles)
                      : store.put(leaving.tensors, offload::Others::handles));
    if (!offloaded->away()) continue;
    bytes += offloaded->bytes().moves;
    for (Entry* entry : leaving.entries) entry->offloaded = offloaded;
  }
  return bytes;
}

void WaitingRoom::copy_out(offload::Store& store, int32_t giver) {
  std::map<const c10::StorageImpl*, std::vector<tape::Crossing>> storages;
  for (const auto& [crossing, entry] : entries_) {
    if (crossing.giver != giver || entry.offloaded || storage_of(entry.tensor) == nullptr) continue;
    storages[storage_of(entry.tensor)].push_back(crossing);
  }
  // In the order of the tape, whatever the addresses.
  for (const auto& [crossing, entry] : entries_) {
    if (crossing.giver != giver || entry.offloaded || storage_of(entry.tensor) == nullptr) continue;
    const auto& aliases = storages.at(storage_of(entry.tensor));
    if (aliases.front() != crossing) continue;
    std::vector<at::Tensor> tensors;
    Copying copying;
    for (const tape::Crossing alias : aliases) {
      tensors.push_back(entries_.at(alias).tensor);
      copying.tensors.emplace_back(alias, version_of(tensors.back()));
    }
    copying.offloaded =
        std::make_shared<offload::Offloaded>(store.start_put(tensors, offload::Others::tensors));
    if (copying.offloaded->away()) copying_.push_back(std::move(copying));
  }
}

void WaitingRoom::finish_leaving(offload::Store& store) {
  for (const Copying& copying : std::exchange(copying_, {})) {
    std::set<const c10::TensorImpl*> tensors;
    bool same = true;
    for (const auto& [crossing, version] : copying.tensors) {
      const at::Tensor& tensor = entries_.at(crossing).tensor;
      tensors.insert(tensor.unsafeGetTensorImpl());
      same = same && version_of(tensor) == version;
    }
    const c10::Storage& storage = entries_.at(copying.tensors.front().first).tensor.storage();
    // Beside the tensors themselves the offloaded place holds it.
    if (!same || storage.use_count() > tensors.size() + 1) continue;
    copying.offloaded->finish_put();
    for (const auto& [crossing, version] : copying.tensors) {
      entries_.at(crossing).offloaded = copying.offloaded;
    }
  }
  offload(store);
}

}  // namespace infinitybatch
