#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

namespace infinitybatch::losses {

// Criteria where each class is a question of its own: yes or no, any number of them yes.

struct BCELossOptions {
  at::Tensor weight = {};  ///< broadcast against one sample, or undefined
  Reduction reduction = Reduction::mean;
};

/// Outputs probabilities; targets in [0, 1], of the outputs' shape. Targets (target, weight) give
/// each sample weights of its own. Denominator of `mean`: the number of elements, weights or not.
SeparableLoss binary_cross_entropy(BCELossOptions options = {});

struct BCEWithLogitsLossOptions {
  at::Tensor weight = {};      ///< broadcast against one sample, or undefined
  at::Tensor pos_weight = {};  ///< broadcast against one sample, or undefined
  Reduction reduction = Reduction::mean;
};

/// As `binary_cross_entropy`, with logits.
SeparableLoss binary_cross_entropy_with_logits(BCEWithLogitsLossOptions options = {});

/// Outputs of any shape; targets -1 or 1. Denominator of `mean`: the number of elements.
SeparableLoss soft_margin(Reduction reduction = Reduction::mean);

/// Outputs (N, C); targets class indices (N, C), ended by -1. Denominator of `mean`: N.
SeparableLoss multilabel_margin(Reduction reduction = Reduction::mean);

struct MultiLabelSoftMarginLossOptions {
  at::Tensor weight = {};  ///< broadcast against one sample, or undefined
  Reduction reduction = Reduction::mean;
};

/// Outputs (N, ..., C) logits; targets 0 or 1, of the same shape.
/// Denominator of `mean`: the number of elements divided by C, weights or not.
SeparableLoss multilabel_soft_margin(MultiLabelSoftMarginLossOptions options = {});

}  // namespace infinitybatch::losses
