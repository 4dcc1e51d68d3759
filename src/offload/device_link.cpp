#include "offload/device_link.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace infinitybatch::offload {
namespace {

at::Tensor as_tensor(const std::byte* data, c10::Device device, int64_t bytes) {
  return at::for_blob(const_cast<std::byte*>(data), {bytes})
      .options(at::TensorOptions(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

DeviceLink::DeviceLink(c10::Device device, double bandwidth)
    : device_(device), bandwidth_(bandwidth) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

std::optional<c10::Event> DeviceLink::mark() const {
  if (device_.is_cpu()) return std::nullopt;
  c10::Event event(device_.type());
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

DeviceLink::Copies::Copies(DeviceLink& link, const Order& order)
    : link_(link), begin_(std::max(order.when, link.free_)) {
  if (!link.stream_) return;
  stream_guard_.emplace(*link.stream_);
  if (order.after) order.after->block(*link.stream_);
}

void DeviceLink::Copies::copy(std::byte* to, c10::Device to_device, const std::byte* from,
                              c10::Device from_device, int64_t bytes) {
  bytes_ += bytes;
  if (!link_.stream_) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  as_tensor(to, to_device, bytes).copy_(as_tensor(from, from_device, bytes), /*non_blocking=*/true);
}

void DeviceLink::Copies::to_host(std::byte* host, const std::byte* device, int64_t bytes) {
  copy(host, c10::Device(c10::DeviceType::CPU), device, link_.device_, bytes);
}

void DeviceLink::Copies::to_device(std::byte* device, const std::byte* host, int64_t bytes) {
  copy(device, link_.device_, host, c10::Device(c10::DeviceType::CPU), bytes);
}

void DeviceLink::Copies::finish() {
  if (link_.stream_) {
    link_.stream_->synchronize();
  } else if (link_.bandwidth_ > 0) {
    const std::chrono::duration<double> least(static_cast<double>(bytes_) / link_.bandwidth_);
    link_.free_ = begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(least);
    std::this_thread::sleep_until(link_.free_);
  }
}

}  // namespace infinitybatch::offload
