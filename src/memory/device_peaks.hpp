#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace infinitybatch::memory {

/// Peaks of accelerators for everybody who watches one, in whichever thread: a device keeps a
/// single peak, so whoever starts it anew first tells all others what it was. Watchers are known by
/// their address.
class DevicePeaks {
 public:
  /// From now on `watcher` sees what is live on `device`.
  static void begin(const void* watcher, c10::Device device);
  static void end(const void* watcher) noexcept;
  /// The most since `begin`.
  static int64_t peak(const void* watcher);
  /// Starts the device's own peak anew, with no loss for those who watch.
  static void reset(c10::Device device);
};

}  // namespace infinitybatch::memory
