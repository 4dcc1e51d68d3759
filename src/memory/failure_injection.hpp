#pragma once

#include <cstdint>
#include <limits>

namespace infinitybatch::memory {

/// For fault tests: while it lives, the n-th allocation on the CPU in this thread, counted from 1,
/// throws c10::OutOfMemoryError; those before and after it succeed. Empty allocations do not count.
/// Works for one such object at a time in a thread, and costs nothing where there is none.
///
///     FailAllocation failure{3};
///     EXPECT_THROW(step(), c10::OutOfMemoryError);
class FailAllocation {
 public:
  /// Counts without failing.
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  /// \param counts tells for each allocation whether it counts; all do without
  /// \throws InvalidArgument where n < 1; StateError where this thread has one, or where torch does
  ///         not use this library's CPU allocator
  explicit FailAllocation(int64_t n, bool (*counts)() = nullptr);
  ~FailAllocation();
  FailAllocation(const FailAllocation&) = delete;
  FailAllocation& operator=(const FailAllocation&) = delete;

  /// Allocations asked for so far, the failed one included.
  int64_t seen() const noexcept { return seen_; }
  bool failed() const noexcept { return seen_ >= n_; }

 private:
  friend class CpuAccounting;

  bool fails() noexcept { return (counts_ == nullptr || counts_()) && ++seen_ == n_; }

  int64_t n_;
  bool (*counts_)();
  int64_t seen_ = 0;
};

}  // namespace infinitybatch::memory
