#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace infinitybatch::offload {

/// The way between a device and the host. On accelerators copies run in one stream of their own,
/// the same for all copies: a new one each time would make the caching allocator reserve more and
/// more. On the CPU they are plain copies, slowed down to the bandwidth of a simulated device.
class DeviceLink {
 public:
  /// \param bandwidth bytes per second; 0: no limit; heeded on the CPU only
  DeviceLink(c10::Device device, double bandwidth);

  c10::Device device() const noexcept { return device_; }
  /// What this thread's current stream was given so far; empty on the CPU.
  std::optional<c10::Event> mark() const;
  /// Whether copies are as fast as the host's memory, and so over before a thread has woken up.
  bool immediate(int64_t bytes) const noexcept {
    return !stream_ && bandwidth_ == 0 && bytes <= kImmediate;
  }

  /// When somebody asks for copies.
  struct Order {
    std::optional<c10::Event> after;  ///< copies begin when the work in front of it is done
    std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now();
  };

  /// Copies in the thread that makes it.
  class Copies {
   public:
    Copies(DeviceLink& link, const Order& order);
    void to_host(std::byte* host, const std::byte* device, int64_t bytes);
    void to_device(std::byte* device, const std::byte* host, int64_t bytes);
    /// Waits until all copies so far are done.
    void finish();

   private:
    void copy(std::byte* to, c10::Device to_device, const std::byte* from, c10::Device from_device,
              int64_t bytes);

    DeviceLink& link_;
    std::optional<c10::StreamGuard> stream_guard_;
    std::chrono::steady_clock::time_point begin_;
    int64_t bytes_ = 0;
  };

 private:
  static constexpr int64_t kImmediate = int64_t{256} << 10;

  c10::Device device_;
  double bandwidth_;
  // A simulated link is free for the next copies then: what this machine takes to wake a thread up
  // is not the link's.
  std::chrono::steady_clock::time_point free_;
  std::optional<c10::Stream> stream_;
};

}  // namespace infinitybatch::offload
