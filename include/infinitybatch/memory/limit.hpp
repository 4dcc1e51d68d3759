#pragma once

#include <cstdint>

namespace infinitybatch::memory {

/// While it lives, a CPU allocation in this thread that would make more than `bytes` live throws
/// c10::OutOfMemoryError. Nested limits: the smaller one counts. Other threads are not limited,
/// though what they hold counts as live.
class Limit {
 public:
  /// \throws InvalidArgument where bytes < 1; StateError where torch does not use this library's
  /// CPU
  ///         allocator, so that nothing would be enforced
  explicit Limit(int64_t bytes);
  ~Limit();
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

  /// What the last allocation that a limit of this thread refused would have made live; 0 where
  /// nothing was refused since this object was made.
  int64_t refused() const noexcept;

  /// Whether a CPU allocation of this thread failed since this object was made: refused by a limit
  /// or by the system, or failed on purpose. Where none did, an out-of-memory error is somebody
  /// else's.
  bool allocation_failed() const noexcept;

 private:
  int64_t outer_;
  int64_t failures_before_;
};

}  // namespace infinitybatch::memory
