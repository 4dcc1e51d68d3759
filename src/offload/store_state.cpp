#include "offload/store_state.hpp"

#include "core/torch_compat.hpp"
#include "offload/absence.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace infinitybatch::offload::detail {
namespace {

std::byte* address(const c10::Storage& storage) {
  return static_cast<std::byte*>(
      storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

}  // namespace

StoreState::StoreState(c10::Device on, StoreOptions with)
    : device(on), options(std::move(with)), link(on, options.bandwidth), places(on, options) {}

std::shared_ptr<Task> StoreState::run(std::function<void()> work, bool in_background,
                                      bool immediate) {
  auto task = std::make_shared<Task>(std::move(work));
  if (!immediate && (in_background || thread_.busy() || !device.is_cpu())) {
    thread_.start(task);
  } else {
    task->run_here();
  }
  return task;
}

void StoreState::finish(Task& task, bool out) {
  const double waited = task.wait();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_.seconds_copying += task.seconds();
    (out ? statistics_.seconds_out : statistics_.seconds_back) += task.seconds();
    // What is waited for may be copies in front of this one, which are told later, and this thread
    // has to wake up.
    statistics_.seconds_waited += task.ran_here() ? task.seconds() : waited;
    statistics_.seconds_hidden =
        std::max(0.0, statistics_.seconds_copying - statistics_.seconds_waited);
  }
  task.rethrow();
}

StoreStatistics StoreState::statistics() const {
  StoreStatistics result;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    result = statistics_;
  }
  places.tell(result);
  return result;
}

void StoreState::note_moved(int64_t out, int64_t back) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  statistics_.moved_out += out;
  statistics_.moved_back += back;
}

OffloadedState::OffloadedState(std::shared_ptr<StoreState> store,
                               std::vector<c10::Storage> storages)
    : store_(std::move(store)) {
  items_.reserve(storages.size());
  int64_t row = 0;
  for (c10::Storage& storage : storages) {
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    items_.push_back({std::move(storage), bytes, row, {}});
    row += Places::row(bytes);
  }
  place_ = store_->places.take(row);
}

OffloadedState::~OffloadedState() {
  if (task_) task_->wait();
  store_->places.give_back(place_);
}

void OffloadedState::start_leaving(bool in_background) {
  std::vector<Piece> pieces;
  pieces.reserve(items_.size());
  for (const Item& item : items_) pieces.push_back({address(item.storage), item.bytes, item.at});
  auto order = std::make_shared<DeviceLink::Order>(DeviceLink::Order{store_->link.mark()});
  task_ = store_->run(
      [this, pieces = std::move(pieces), order = std::move(order)] {
        DeviceLink::Copies copies(store_->link, *order);
        store_->places.copy_out(place_, pieces, copies);
      },
      in_background, is_immediate());
  phase_ = Phase::leaving;
}

/// Takes all memory that `finish_leaving` needs: nothing can fail after it.
void OffloadedState::announce_away() const {
  size_t announced = 0;
  try {
    for (; announced < items_.size(); ++announced) {
      compat::announce_absence(*items_[announced].storage.unsafeGetStorageImpl(), kAbsent);
    }
  } catch (...) {
    for (size_t i = 0; i <= announced; ++i) {
      compat::end_absence(*items_[i].storage.unsafeGetStorageImpl());
    }
    throw;
  }
}

void OffloadedState::finish_leaving() {
  if (phase_ != Phase::leaving) return;
  phase_ = Phase::at_home;
  store_->finish(*std::exchange(task_, nullptr), /*out=*/true);
  announce_away();
  int64_t moved = 0;
  for (const Item& item : items_) {
    c10::StorageImpl& storage = *item.storage.unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
    moved += item.bytes;
  }
  phase_ = Phase::away;
  store_->note_moved(moved, 0);
}

void OffloadedState::require_unchanged() const {
  for (const Item& item : items_) {
    const bool has_memory = address(item.storage) != nullptr;
    const auto bytes = static_cast<int64_t>(item.storage.nbytes());
    if (!has_memory && bytes == item.bytes) continue;
    throw StateError("a offloaded storage of " + std::to_string(item.bytes) + " bytes " +
                     (has_memory ? "was given other memory"
                                 : "was resized to " + std::to_string(bytes) + " bytes") +
                     " while it was away; bring tensors back before they are resized");
  }
}

void OffloadedState::start_returning(bool in_background) {
  if (phase_ != Phase::away) return;
  require_unchanged();
  std::vector<Piece> pieces;
  pieces.reserve(items_.size());
  try {
    std::optional<c10::DeviceGuard> guard;
    if (!store_->device.is_cpu()) guard.emplace(store_->device);
    c10::Allocator* allocator = c10::GetAllocator(store_->device.type());
    for (Item& item : items_) {
      if (item.storage.use_count() == 1) continue;  // nobody but us
      item.block = allocator->allocate(static_cast<size_t>(item.bytes));
      pieces.push_back({static_cast<std::byte*>(item.block.get()), item.bytes, item.at});
    }
    auto order = std::make_shared<DeviceLink::Order>(DeviceLink::Order{store_->link.mark()});
    task_ = store_->run(
        [this, pieces = std::move(pieces), order = std::move(order)] {
          DeviceLink::Copies copies(store_->link, *order);
          store_->places.copy_back(place_, pieces, copies);
        },
        in_background, is_immediate());
  } catch (...) {
    drop_blocks();
    throw;
  }
  phase_ = Phase::returning;
}

void OffloadedState::finish_returning() {
  if (phase_ != Phase::returning) return;
  phase_ = Phase::away;
  try {
    store_->finish(*std::exchange(task_, nullptr), /*out=*/false);
    require_unchanged();
  } catch (...) {
    drop_blocks();
    throw;
  }
  int64_t moved = 0;
  for (Item& item : items_) {
    if (!item.block) continue;
    c10::StorageImpl& storage = *item.storage.unsafeGetStorageImpl();
    compat::end_absence(storage);
    storage.set_data_ptr_noswap(std::move(item.block));
    moved += item.bytes;
  }
  phase_ = Phase::at_home;
  store_->note_moved(0, moved);
}

/// Waking the copy thread would take longer.
bool OffloadedState::is_immediate() const noexcept {
  return place_.disk_bytes == 0 && store_->link.immediate(place_.host_bytes);
}

void OffloadedState::drop_blocks() noexcept {
  for (Item& item : items_) item.block.clear();
}

}  // namespace infinitybatch::offload::detail
