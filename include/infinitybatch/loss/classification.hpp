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

/// Cross entropy of logits that a linear layer of the loss's own makes of the outputs (N,
/// features), as torch.nn.functional.linear_cross_entropy does. \param linear_weight (C, d1, ...,
/// features), may require grad \param linear_bias   (C, d1, ...) or undefined, may require grad
SeparableLoss linear_cross_entropy(at::Tensor linear_weight, at::Tensor linear_bias = {},
                                   CrossEntropyLossOptions options = {});

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
