#pragma once

#include "core/foreign_exception.hpp"

#include <cstdint>
#include <exception>
#include <limits>

namespace infinitybatch {

/// Tells whether forward, or the loss, may have failed because it was given too few samples:
/// `a, b, c = x.chunk(3)` fails on two. On as many as it went through with before it fails for
/// another reason, and so does what goes through when it runs once more on the same.
class FewestRows {
 public:
  /// Somebody asks for `failed`: from now on what fails on fewer than `total` runs once more.
  void look(int64_t total) noexcept { total_ = total; }

  template <typename Run>
  void watch(int64_t rows, const Run& run) {
    failed_ = 0;
    const std::exception_ptr error = error_of(run);
    if (!error) {
      if (rows < fewest_) fewest_ = rows;
      return;
    }
    if (rows < fewest_ && may_be_of_few(error)) {
      const std::exception_ptr again = rows < total_ ? error_of(run) : error;
      if (again && !may_be_of_few(again)) std::rethrow_exception(again);
      if (again) failed_ = rows;
    }
    std::rethrow_exception(error);
  }

  /// What fails from now on fails for other reasons.
  void forget() noexcept { failed_ = 0; }

  /// How many samples were too few in the last run; 0 where it did not fail, or not for that.
  int64_t failed() const noexcept { return failed_; }

 private:
  /// Not what this library says, nor what ends the step, nor a lack of memory.
  static bool may_be_of_few(const std::exception_ptr& error);

  template <typename Run>
  static std::exception_ptr error_of(const Run& run) {
    try {
      run();
      return nullptr;
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      return std::current_exception();
    }
  }

  int64_t total_ = 0;
  int64_t fewest_ = std::numeric_limits<int64_t>::max();
  int64_t failed_ = 0;
};

}  // namespace infinitybatch
