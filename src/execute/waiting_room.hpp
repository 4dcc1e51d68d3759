#pragma once

#include "offload/store.hpp"
#include "tape/segment.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace infinitybatch {

/// What waits at the cuts of one micro-batch's tape, and where: on the device, or offloaded.
class WaitingRoom {
 public:
  bool contains(tape::Crossing crossing) const { return entries_.contains(crossing); }
  /// On the device, where it is brought first if it was away. \throws what `Offloaded::bring_back`
  /// does
  at::Tensor& at(tape::Crossing crossing) { return here(entries_.at(crossing)); }
  /// The same; undefined where nothing waits yet.
  at::Tensor& operator[](tape::Crossing crossing) { return here(entries_[crossing]); }
  void erase(tape::Crossing crossing) { entries_.erase(crossing); }
  /// \param which `bool(tape::Crossing, bool defined)`
  template <typename Which>
  void erase_if(Which&& which) {
    std::erase_if(entries_, [&](const auto& entry) {
      return which(entry.first, entry.second.tensor.defined());
    });
  }

  /// Brings back what of these is away. With `ahead` memory is taken, and copies run in the
  /// background until they are asked for. \returns bytes on their way
  int64_t fetch(const std::set<tape::Crossing>& which, bool ahead);

  /// Everything that is on the device, and that nobody else holds, leaves it, but for what shares
  /// memory with `staying`.
  /// \returns bytes that had not begun to leave
  /// \throws OffloadError where there is no room; everything is as it was
  int64_t offload(offload::Store& store, const std::set<tape::Crossing>& staying = {}) {
    return leave(store, staying, /*in_background=*/false);
  }
  /// The same in the background: its memory is free once `offload` was called.
  int64_t start_leaving(offload::Store& store) { return leave(store, {}, /*in_background=*/true); }

  /// Copies what segment `giver` gave in the background, while others may still hold and read it.
  void copy_out(offload::Store& store, int32_t giver);
  /// Ends what `copy_out` began: what nobody else holds any more has left, the rest is tried again
  /// by the next call.
  void finish_leaving(offload::Store& store);

 private:
  struct Entry {
    at::Tensor tensor;
    std::shared_ptr<offload::Offloaded> offloaded;  // of all that left with it
  };
  /// What `copy_out` began, of one storage.
  struct Copying {
    std::shared_ptr<offload::Offloaded> offloaded;
    std::vector<std::pair<tape::Crossing, uint32_t>> tensors;  // with their version then
  };

  static at::Tensor& here(Entry& entry) {
    if (entry.offloaded) {
      entry.offloaded->bring_back();
      entry.offloaded.reset();
    }
    return entry.tensor;
  }
  int64_t leave(offload::Store& store, const std::set<tape::Crossing>& staying, bool in_background);

  std::map<tape::Crossing, Entry> entries_;
  std::vector<Copying> copying_;
};

}  // namespace infinitybatch
