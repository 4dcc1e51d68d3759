#include "memory/accelerator.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace infinitybatch::memory {

Accelerator::Accelerator(c10::Device device) : device_(device), allocator_(nullptr) {
  if (device.type() != c10::DeviceType::CPU) {
    allocator_ = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  }
  if (allocator_ == nullptr) {
    throw InvalidArgument("this torch has no memory statistics for the device '" + device.str() +
                          "'; use 'cpu' or an accelerator that torch sees");
  }
  if (!allocator_->initialized()) at::globalContext().lazyInitDevice(device.type());
  if (!device.has_index()) device_ = c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

Accelerator::Usage Accelerator::usage() const {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator_->getDeviceStats(device_.index());
  return {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak,
          stats.reserved_bytes[kAll].current};
}

void Accelerator::reset_peak() const {
  allocator_->resetPeakStats(device_.index());
}

std::optional<Accelerator::Capacity> Accelerator::capacity() const {
  try {
    const auto [free, total] = allocator_->getMemoryInfo(device_.index());
    return Capacity{static_cast<int64_t>(free), static_cast<int64_t>(total)};
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
}

}  // namespace infinitybatch::memory
