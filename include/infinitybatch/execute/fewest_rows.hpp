#pragma once

#include <cstdint>
#include <exception>
#include <limits>

namespace infinitybatch {

/// Tells whether forward, or the loss, may have failed because it was given too few samples:
/// `a, b, c = x.chunk(3)` fails on two. On as many as it went through with before it fails for
/// another reason.
class FewestRows {
 public:
  template <typename Run>
  void watch(int64_t rows, const Run& run) {
    failed_ = 0;
    try {
      run();
    } catch (...) {
      if (rows < fewest_ && may_be_of_few(std::current_exception())) failed_ = rows;
      throw;
    }
    if (rows < fewest_) fewest_ = rows;
  }

  /// What fails from now on fails for other reasons.
  void forget() noexcept { failed_ = 0; }

  /// How many samples were too few in the last run; 0 where it did not fail, or not for that.
  int64_t failed() const noexcept { return failed_; }

 private:
  /// Not what this library says, nor what ends the step, nor a lack of memory.
  static bool may_be_of_few(const std::exception_ptr& error);

  int64_t fewest_ = std::numeric_limits<int64_t>::max();
  int64_t failed_ = 0;
};

}  // namespace infinitybatch
