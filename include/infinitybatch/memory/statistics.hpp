#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace infinitybatch::memory {

/// What tensors occupy on one device, in bytes.
struct Statistics {
  int64_t live = 0;                ///< occupied now
  int64_t peak = 0;                ///< the most since `reset_peak`
  std::optional<int64_t> reserved; ///< held by a caching allocator; empty on the CPU
  std::optional<int64_t> limit;    ///< in force in this thread (CPU only)
  int64_t total = 0;               ///< what the device has (CPU: physical memory or the cgroup's limit)
};

/// On the CPU this counts what torch's CPU allocator gave since this library was loaded. Not seen:
/// memory that torch did not allocate (NumPy, mapped files), scratch of oneDNN and MKL, OpenMP.
/// On accelerators it asks the device's caching allocator.
Statistics stats(c10::Device device);

void reset_peak(c10::Device device);

/// The peak of live bytes on `device` between construction and now, in this thread.
/// Scopes may nest. On accelerators the outermost scope resets the device's peak.
class PeakScope {
 public:
  explicit PeakScope(c10::Device device);
  ~PeakScope();
  PeakScope(const PeakScope&) = delete;
  PeakScope& operator=(const PeakScope&) = delete;
  int64_t peak() const;

 private:
  c10::Device device_;
  int64_t peak_ = 0;            // CPU: kept by the allocator while this scope is the thread's innermost
  PeakScope* outer_ = nullptr;
  friend class CpuAccounting;
};

}  // namespace infinitybatch::memory
