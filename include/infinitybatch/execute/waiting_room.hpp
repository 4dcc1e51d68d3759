#pragma once

#include <infinitybatch/park/store.hpp>
#include <infinitybatch/tape/segment.hpp>

#include <map>
#include <memory>

namespace infinitybatch {

/// What waits at the cuts of one micro-batch's tape, and where: on the device, or parked.
class WaitingRoom {
 public:
  bool contains(tape::Crossing crossing) const { return entries_.contains(crossing); }
  /// On the device, where it is brought first if it was away. \throws what `Parked::bring_back`
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

  /// Everything that is on the device, and that nobody else holds, leaves it.
  /// \throws ParkingError where there is no room; everything is as it was
  void park(park::Store& store);

 private:
  struct Entry {
    at::Tensor tensor;
    std::shared_ptr<park::Parked> parked;  // of all that left with it
  };
  static at::Tensor& here(Entry& entry) {
    if (entry.parked) {
      entry.parked->bring_back();
      entry.parked.reset();
    }
    return entry.tensor;
  }

  std::map<tape::Crossing, Entry> entries_;
};

}  // namespace infinitybatch
