#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace infinitybatch::park {

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

  /// Copies in the thread that makes it. They begin when the work in front of `after` is done.
  class Copies {
   public:
    Copies(const DeviceLink& link, const std::optional<c10::Event>& after);
    void to_host(std::byte* host, const std::byte* device, int64_t bytes);
    void to_device(std::byte* device, const std::byte* host, int64_t bytes);
    /// Waits until all copies so far are done.
    void finish();

   private:
    void copy(std::byte* to, c10::Device to_device, const std::byte* from, c10::Device from_device,
              int64_t bytes);

    const DeviceLink& link_;
    std::optional<c10::StreamGuard> stream_guard_;
    std::chrono::steady_clock::time_point begin_;
    int64_t bytes_ = 0;
  };

 private:
  c10::Device device_;
  double bandwidth_;
  std::optional<c10::Stream> stream_;
};

}  // namespace infinitybatch::park
