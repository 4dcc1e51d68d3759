#pragma once

#include <exception>
#include <utility>

namespace infinitybatch {

/// What goes wrong inside of a callback of torch's (`at::RecordFunction`). Torch would only log it,
/// and the op would go by unseen: whoever believes the watch or the recording afterwards computes
/// something else without a word. So callbacks run their bodies here, the first error is kept, and
/// whoever ran the ops calls `rethrow` before anything is believed.
class CallbackErrors {
 public:
  template <typename Body>
  void guard(Body&& body) noexcept {
    const Inside inside;
    guard_part(std::forward<Body>(body));
  }

  /// A part of such a body that may fail by itself: the rest goes on, and the error is kept.
  template <typename Part>
  void guard_part(Part&& part) noexcept {
    try {
      std::forward<Part>(part)();
    } catch (...) {
      keep(std::current_exception());
    }
  }

  bool any() const noexcept { return first_ != nullptr; }
  /// \throws the first error, as it was thrown, and forgets it
  void rethrow() {
    if (first_) std::rethrow_exception(std::exchange(first_, nullptr));
  }
  void forget() noexcept { first_ = nullptr; }

  /// Whether this thread is inside of such a body: for fault tests, where allocations fail here.
  static bool at_work() noexcept;

 private:
  struct Inside {
    Inside() noexcept;
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };
  void keep(std::exception_ptr error) noexcept;

  std::exception_ptr first_;
};

}  // namespace infinitybatch
