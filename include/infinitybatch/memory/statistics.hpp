#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace infinitybatch::memory {

/// What tensors occupy on one device, in bytes.
struct Statistics {
  int64_t live = 0;  ///< occupied now
  int64_t peak = 0;  ///< the most since `reset_peak`
  /// Held by the allocator: live, and free for the next tensors. On the CPU it stays within a
  /// thirty-second part, or 2 MiB, of the most that was live in the last minutes.
  int64_t reserved = 0;
  std::optional<int64_t> limit;  ///< in force in this thread (CPU only)
  /// What the device has; on the CPU physical memory or the cgroup's limit, read once. 0 where an
  /// accelerator does not say.
  int64_t total = 0;
};

/// On the CPU this counts what torch's CPU allocator gave since this library was loaded. Not seen:
/// memory that torch did not allocate (NumPy, mapped files), pinned memory, scratch of oneDNN and
/// MKL, OpenMP. On accelerators it asks the device's caching allocator.
/// \throws InvalidArgument where torch has no memory statistics for `device`
Statistics stats(c10::Device device);

/// `stats(device).live`, which is asked for often: a device is not asked what it has.
int64_t live(c10::Device device);

/// On accelerators this is the peak that `torch.accelerator.max_memory_allocated()` shows.
void reset_peak(c10::Device device);

/// Gives the memory that the CPU's allocator keeps for the next tensors back to the system, as a
/// process wants that trains no longer: without that it is looked at when a large tensor comes or
/// goes. Accelerators have `torch.accelerator.empty_cache`.
void empty_cache() noexcept;

/// Bytes that tensors on `device` could still be given now: on the CPU available physical memory or
/// the cgroup's headroom, on accelerators free memory, and on both what the allocator holds unused
/// (on accelerators it may be too fragmented for one tensor). 0 where an accelerator does not say.
int64_t available(c10::Device device);

/// The peak of live bytes on `device` between construction and now, which starts at what is live at
/// construction. On the CPU what other threads hold counts, but only allocations of the thread that
/// made the scope raise the peak. Scopes nest: what an inner one sees counts towards the outer. On
/// accelerators whatever happens on the device counts, and each scope resets the device's own peak.
/// Use it in one thread, and end inner scopes first.
class PeakScope {
 public:
  /// \throws StateError on the CPU where torch does not use this library's allocator
  explicit PeakScope(c10::Device device);
  ~PeakScope();
  PeakScope(const PeakScope&) = delete;
  PeakScope& operator=(const PeakScope&) = delete;
  int64_t peak() const;

 private:
  friend class CpuAccounting;

  c10::Device device_;
  int64_t peak_ = 0;            // CPU: kept by the allocator while this scope is the innermost
  PeakScope* outer_ = nullptr;  // CPU: the next scope of this thread
};

}  // namespace infinitybatch::memory
