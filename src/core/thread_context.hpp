#pragma once

#include <type_traits>
#include <utility>

namespace infinitybatch {

class CarriedState;
class LossState;
class PlainNumbers;
namespace coupled {
class OriginalWeights;
}
namespace memory {
class Limit;
}

/// Who is at work in this thread, the innermost of each kind: code that a model or a loss calls
/// finds here whom to tell. Null where nobody wants to know.
struct ThreadContext {
  CarriedState* carried_state = nullptr;
  LossState* loss_state = nullptr;
  PlainNumbers* numbers = nullptr;
  coupled::OriginalWeights* original_weights = nullptr;
  memory::Limit* measured_limit = nullptr;
  /// Forward sees all samples, and its outputs are the caller's as they are: nobody joins them.
  bool sees_all = false;
  bool met_wrapped = false;  ///< forward has called a wrapped part, which computed plainly
  bool provisional = false;  ///< functions of `across_batch` run for the form of their result alone

  /// Out of line: every library that is loaded sees the same one.
  static ThreadContext& get() noexcept;
};

/// While it lives, that member of the context is this.
template <auto member>
class Within {
 public:
  using Value = std::remove_reference_t<decltype(std::declval<ThreadContext&>().*member)>;

  explicit Within(Value now) noexcept : outer_(std::exchange(ThreadContext::get().*member, now)) {}
  ~Within() { ThreadContext::get().*member = outer_; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  Value outer_;
};

}  // namespace infinitybatch
