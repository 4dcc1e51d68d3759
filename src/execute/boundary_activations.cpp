#include "execute/boundary_activations.hpp"

#include "core/tensor_parts.hpp"

#include <utility>

namespace infinitybatch {

void BoundaryActivations::add_gradient(tape::Crossing crossing, at::Tensor gradient) {
  at::Tensor& sum = gradients_[crossing];
  if (sum.defined()) {
    sum.add_(gradient);
    return;
  }
  // Gradients of views may lie in memory that they share with another leaf's.
  const bool alone = is_plain(gradient) && gradient.storage().use_count() == 1;
  sum = alone ? std::move(gradient) : gradient.clone();
}

at::Tensor BoundaryActivations::take_gradient(tape::Crossing crossing) {
  if (!gradients_.contains(crossing)) return {};
  at::Tensor gradient = std::move(gradients_.at(crossing));
  gradients_.erase(crossing);
  return gradient;
}

}  // namespace infinitybatch
