#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace infinitybatch::memory {

/// One accelerator's memory as its caching allocator tells it, through c10's generic interface.
class Accelerator {
 public:
  /// A device without an index is the current one of its type.
  /// \throws InvalidArgument where torch has no memory statistics for `device`
  explicit Accelerator(c10::Device device);

  c10::Device device() const noexcept { return device_; }

  struct Usage {
    int64_t live;
    int64_t peak;
    int64_t reserved;
  };
  Usage usage() const;
  void reset_peak() const;

  struct Capacity {
    int64_t free;
    int64_t total;
  };
  /// Empty where the device does not say.
  std::optional<Capacity> capacity() const;

 private:
  c10::Device device_;
  c10::DeviceAllocator* allocator_;
};

}  // namespace infinitybatch::memory
