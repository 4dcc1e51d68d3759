#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace infinitybatch::memory {

class HighWater;

/// While it lives, a CPU allocation in this thread that would make more than `bytes` live throws
/// c10::OutOfMemoryError. Nested limits: the smaller one counts. Other threads are not limited,
/// though what they hold counts as live.
///
/// On an accelerator nothing can refuse an allocation: there `check` throws once more than `bytes`
/// has been live since the limit was made.
class Limit {
 public:
  /// \throws InvalidArgument where bytes < 1; StateError where torch does not use this library's
  /// CPU
  ///         allocator, so that nothing would be enforced
  explicit Limit(int64_t bytes, c10::Device device = c10::DeviceType::CPU);
  ~Limit();
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

  /// Looks whether a limit of this thread has been passed on its accelerator. Costs a look at the
  /// allocator's statistics, and waits for nothing.
  /// \throws c10::OutOfMemoryError where one has
  static void check();

  /// Whether `check` would throw.
  static bool is_passed();

  /// The smallest of this thread's limits on accelerators.
  static std::optional<int64_t> measured();

  /// What the last allocation that a limit of this thread refused would have made live; 0 where
  /// nothing was refused since this object was made.
  /// On an accelerator the most that `check` found.
  int64_t refused() const noexcept;

  /// Whether a CPU allocation of this thread failed since this object was made: refused by a limit
  /// or by the system, or failed on purpose. Where none did, an out-of-memory error is somebody
  /// else's. On an accelerator nobody knows, and the answer is yes.
  bool allocation_failed() const noexcept;

 private:
  /// The innermost of this thread's limits that has been passed on its accelerator, or null.
  static Limit* passed();

  int64_t bytes_;
  int64_t outer_ = 0;
  int64_t failures_before_ = 0;
  // Of an accelerator:
  std::unique_ptr<HighWater> seen_;
  int64_t passed_ = 0;
  Limit* outer_measured_ = nullptr;
};

/// How many CPU allocations of this thread have failed, for whatever reason, since it began.
int64_t failed_allocations() noexcept;

}  // namespace infinitybatch::memory
