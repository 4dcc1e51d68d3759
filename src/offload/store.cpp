#include "offload/store.hpp"

#include "offload/movable.hpp"
#include "offload/store_state.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace infinitybatch::offload {
namespace {

c10::Device checked(c10::Device device) {
  if (device.is_cpu()) return c10::Device(c10::DeviceType::CPU);
  if (!c10::impl::hasDeviceGuardImpl(device.type()) ||
      c10::impl::VirtualGuardImpl(device.type()).deviceCount() == 0) {
    throw InvalidArgument("tensors of '" + device.str() +
                          "' cannot be offloaded: torch has no such device here; use 'cpu' or an "
                          "accelerator that torch sees");
  }
  if (device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

StoreOptions checked(StoreOptions options) {
  if (options.host_bytes < 0 || options.disk_bytes < 0) {
    throw InvalidArgument("a store of " + std::to_string(options.host_bytes) +
                          " bytes on the host and " + std::to_string(options.disk_bytes) +
                          " bytes on disk was asked for; both are 0 or more");
  }
  if (!(options.bandwidth >= 0) || std::isinf(options.bandwidth)) {
    throw InvalidArgument("a bandwidth of " + std::to_string(options.bandwidth) +
                          " bytes per second was given; it is finite, and 0 means no limit");
  }
  return options;
}

}  // namespace

Offloaded::Offloaded() noexcept = default;
Offloaded::Offloaded(Offloaded&&) noexcept = default;
Offloaded& Offloaded::operator=(Offloaded&&) noexcept = default;
Offloaded::~Offloaded() = default;

void Offloaded::finish_put() {
  if (!state_) return;
  try {
    state_->finish_leaving();
  } catch (...) {
    state_.reset();
    throw;
  }
}

bool Offloaded::returning() const noexcept {
  return state_ && state_->phase() == detail::OffloadedState::Phase::returning;
}

void Offloaded::prefetch() {
  finish_put();
  if (state_) state_->start_returning(/*in_background=*/true);
}

void Offloaded::bring_back() {
  finish_put();
  if (!state_) return;
  state_->start_returning(/*in_background=*/false);
  state_->finish_returning();
  state_.reset();
}

Store::Store(c10::Device device, StoreOptions options)
    : state_(std::make_shared<detail::StoreState>(checked(device), checked(std::move(options)))) {}

Store::~Store() = default;
Store::Store(Store&&) noexcept = default;
Store& Store::operator=(Store&&) noexcept = default;

Offloaded Store::start(MovableStorages movable, bool in_background) {
  Offloaded offloaded;
  offloaded.bytes_ = movable.bytes;
  if (movable.storages.empty()) return offloaded;
  offloaded.state_ = std::make_unique<detail::OffloadedState>(state_, std::move(movable.storages));
  offloaded.state_->start_leaving(in_background);
  return offloaded;
}

Offloaded Store::put(at::ArrayRef<at::Tensor> tensors, Others others) {
  Offloaded offloaded = start(movable_storages(tensors, others, state_->device), false);
  offloaded.finish_put();
  return offloaded;
}

Offloaded Store::put(at::ArrayRef<c10::Storage> storages) {
  Offloaded offloaded = start(movable_storages(storages, state_->device), false);
  offloaded.finish_put();
  return offloaded;
}

Offloaded Store::start_put(at::ArrayRef<at::Tensor> tensors, Others others) {
  return start(movable_storages(tensors, others, state_->device), true);
}

Offloaded Store::start_put(at::ArrayRef<c10::Storage> storages) {
  return start(movable_storages(storages, state_->device), true);
}

Movable Store::movable(at::ArrayRef<at::Tensor> tensors, Others others) const {
  return movable_storages(tensors, others, state_->device).bytes;
}

Store::Need Store::need(at::ArrayRef<int64_t> storages, int64_t host_free) {
  return Places::need(Places::row(storages), host_free);
}

StoreStatistics Store::statistics() const {
  return state_->statistics();
}

c10::Device Store::device() const noexcept {
  return state_->device;
}

const StoreOptions& Store::options() const noexcept {
  return state_->options;
}

const DiskFile* Store::file() const noexcept {
  return state_->places.file();
}

}  // namespace infinitybatch::offload
