#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

namespace infinitybatch::losses {

struct CrossEntropyLossOptions {
  at::Tensor weight = {};  ///< (C), or undefined
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;  ///< in [0, 1]
  Reduction reduction = Reduction::mean;
};

/// Outputs (N, C, d1, ...) logits; targets class indices (N, d1, ...) or class probabilities of the
/// outputs' shape: integers are indices, floating point numbers probabilities.
/// Denominator of `mean`: the sum of weight[target] over targets that are not ignored (all ignored:
/// 0, the loss is NaN as native's is); for probabilities N·d1·..., weights or not.
SeparableLoss cross_entropy(CrossEntropyLossOptions options = {});

struct NLLLossOptions {
  at::Tensor weight = {};  ///< (C), or undefined
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};

/// Outputs (N, C, d1, ...) log-probabilities; targets class indices (N, d1, ...). NLLLoss2d too.
/// Denominator of `mean`: as in `cross_entropy`.
SeparableLoss nll(NLLLossOptions options = {});

struct MultiMarginLossOptions {
  int64_t p = 1;  ///< 1 or 2
  double margin = 1.0;
  at::Tensor weight = {};  ///< (C), or undefined
  Reduction reduction = Reduction::mean;
};

/// Outputs (N, C); targets class indices (N). Denominator of `mean`: N, weights or not.
SeparableLoss multi_margin(MultiMarginLossOptions options = {});

}  // namespace infinitybatch::losses
