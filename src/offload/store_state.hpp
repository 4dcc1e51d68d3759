#pragma once

#include "offload/copy_thread.hpp"
#include "offload/device_link.hpp"
#include "offload/places.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace infinitybatch::offload::detail {

/// What a store and everything that is offloaded in it share.
class StoreState {
 public:
  StoreState(c10::Device device, StoreOptions options);

  /// Runs `work` here where it is `immediate`, or in the copy thread where it need not be waited
  /// for, where that is busy with other copies, and for accelerators, whose copies are ops that
  /// nothing that watches this thread's ops should see.
  std::shared_ptr<Task> run(std::function<void()> work, bool in_background, bool immediate);
  /// Waits for `task` and notes how long it took. Throws what it threw.
  void finish(Task& task, bool out);

  StoreStatistics statistics() const;
  void note_moved(int64_t out, int64_t back) noexcept;

  const c10::Device device;
  const StoreOptions options;
  DeviceLink link;  // of the thread that copies
  Places places;

 private:
  mutable std::mutex mutex_;
  StoreStatistics statistics_;
  CopyThread thread_;  // last: it ends before what its tasks use
};

/// Storages that are leaving, away, or returning.
class OffloadedState {
 public:
  OffloadedState(std::shared_ptr<StoreState> store, std::vector<c10::Storage> storages);
  ~OffloadedState();
  OffloadedState(const OffloadedState&) = delete;
  OffloadedState& operator=(const OffloadedState&) = delete;

  void start_leaving(bool in_background);
  /// Waits for the copies, then takes the memory away.
  void finish_leaving();
  void start_returning(bool in_background);
  /// Waits for the copies, then gives the memory back. Falls back to `away` where they failed.
  void finish_returning();

  enum class Phase { at_home, leaving, away, returning };
  Phase phase() const noexcept { return phase_; }

 private:
  struct Item {
    c10::Storage storage;
    int64_t bytes;
    int64_t at;          // in the row of bytes
    c10::DataPtr block;  // its memory to be, while returning
  };

  void announce_away() const;
  void require_unchanged() const;
  bool is_immediate() const noexcept;
  void drop_blocks() noexcept;

  std::shared_ptr<StoreState> store_;
  std::vector<Item> items_;
  Place place_;
  Phase phase_ = Phase::at_home;
  std::shared_ptr<Task> task_;
};

}  // namespace infinitybatch::offload::detail
