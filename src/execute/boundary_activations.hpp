#pragma once

#include "execute/waiting_room.hpp"
#include "tape/segment.hpp"

#include <cstdint>
#include <set>

namespace infinitybatch {

/// The saved boundary activations of one micro-batch, detached, and the gradients of those that
/// want one: on the device, or offloaded.
class BoundaryActivations {
 public:
  /// Some of both.
  struct Some {
    std::set<tape::Crossing> values;
    std::set<tape::Crossing> gradients;
  };

  BoundaryActivations() = default;
  BoundaryActivations(WaitingRoom values, std::set<tape::Crossing> differentiable)
      : values_(std::move(values)), differentiable_(std::move(differentiable)) {}

  /// Saves one, as a segment gave it.
  void save(tape::Crossing crossing, const at::Tensor& given) {
    values_[crossing] = given.detach();
    if (given.requires_grad()) differentiable_.insert(crossing);
  }
  /// On the device, where it is brought first if it was offloaded.
  const at::Tensor& at(tape::Crossing crossing) { return values_.at(crossing); }
  bool differentiable(tape::Crossing crossing) const { return differentiable_.contains(crossing); }
  /// \param which `bool(tape::Crossing)`
  template <typename Which>
  void forget_if(Which&& which) {
    values_.erase_if([&](tape::Crossing crossing, bool) { return which(crossing); });
  }

  /// Adds to one's gradient.
  void add_gradient(tape::Crossing crossing, at::Tensor gradient);
  /// Its gradient so far; undefined where there is none.
  at::Tensor& gradient(tape::Crossing crossing) { return gradients_[crossing]; }
  /// Takes it; undefined where there is none.
  at::Tensor take_gradient(tape::Crossing crossing);
  void forget_undefined_gradients() {
    gradients_.erase_if([](tape::Crossing, bool defined) { return !defined; });
  }
  void forget_gradients() { gradients_ = WaitingRoom(); }

  // Each returns the bytes whose copies begin.
  int64_t restore(const Some& some, bool ahead) {
    return values_.fetch(some.values, ahead) + gradients_.fetch(some.gradients, ahead);
  }
  int64_t start_offload(offload::Store& store) {
    return values_.start_leaving(store) + gradients_.start_leaving(store);
  }
  /// All is offloaded but `some`.
  int64_t finish_offload(offload::Store& store, const Some& some = {}) {
    const int64_t bytes = values_.offload(store, some.values);
    return bytes + gradients_.offload(store, some.gradients);
  }

 private:
  WaitingRoom values_;
  std::set<tape::Crossing> differentiable_;
  WaitingRoom gradients_;
};

}  // namespace infinitybatch
