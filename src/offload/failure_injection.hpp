#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>

namespace infinitybatch::offload {

/// For fault tests: while it lives, the n-th transfer to or from a disk file of the process,
/// counted from 1, fails with `error`; those before and after it succeed. One at a time in the
/// process.
///
///     FailDisk failure{2, ENOSPC};
///     EXPECT_THROW(store.put(tensors), OffloadError);
class FailDisk {
 public:
  /// Counts without failing.
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  /// \throws InvalidArgument where n < 1; StateError where there is one
  explicit FailDisk(int64_t n, int error = ENOSPC);
  ~FailDisk();
  FailDisk(const FailDisk&) = delete;
  FailDisk& operator=(const FailDisk&) = delete;

  /// Transfers so far, the failed one included.
  int64_t seen() const noexcept { return seen_.load(); }
  bool failed() const noexcept { return seen() >= n_; }

  /// Asked by DiskFile in front of each transfer. \returns 0 or the error
  static int next() noexcept;

 private:
  int64_t n_;
  int error_;
  std::atomic<int64_t> seen_{0};
};

}  // namespace infinitybatch::offload
