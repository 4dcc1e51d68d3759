#pragma once

#include "loss/arguments.hpp"

namespace infinitybatch::losses {

/// (input, target) -> a criterion's loss with the given at::Reduction.
using PairLoss =
    std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target, int64_t reduction)>;

/// A criterion with one loss for each element of input and target.
SeparableLoss elementwise(std::string name, Reduction reduction, PairLoss loss);

/// The same, where the targets may be (target, weight) with weights of the input's shape.
enum class WeightedMean {
  over_weights,   ///< the mean divides by the sum of the weights
  over_elements,  ///< the mean divides by the number of elements
};
SeparableLoss weighted_elementwise(std::string name, Reduction reduction, WeightedMean mean,
                                   PairLoss loss);

}  // namespace infinitybatch::losses
