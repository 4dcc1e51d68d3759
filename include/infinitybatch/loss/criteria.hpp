#pragma once

#include <infinitybatch/loss/loss.hpp>

#include <optional>

namespace infinitybatch {

/// How a criterion turns the samples' losses into one number.
enum class Reduction { mean, sum, batchmean };

namespace losses {

struct CrossEntropyOptions {
  at::Tensor weight;             ///< per class, or undefined
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Reduction reduction = Reduction::mean;
};

/// `torch::nn::functional::cross_entropy` with class indices or class probabilities.
/// Denominator of `mean`: the sum of weight[target] over targets that are not ignored; for class
/// probabilities the number of targets, weights or not.
SeparableLoss cross_entropy(CrossEntropyOptions options = {});

/// Squared error; targets have the outputs' shape. Denominator of `mean`: the number of elements.
SeparableLoss mse(Reduction reduction = Reduction::mean);

}  // namespace losses
}  // namespace infinitybatch
