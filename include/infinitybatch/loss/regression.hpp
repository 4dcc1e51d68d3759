#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

namespace infinitybatch::losses {

// Elementwise criteria: one loss for each element of outputs and targets, which have one shape.
// Another shape is broadcast, as natively, where that leaves the samples alone: same rank, same
// number of samples. Denominator of `mean` if nothing else is said: the number of elements.

/// Squared error. Targets (target, weight) with weights of the outputs' shape are
/// torch.nn.functional.mse_loss(weight=...): the denominator of `mean` is the sum of the weights.
SeparableLoss mse(Reduction reduction = Reduction::mean);

/// Absolute error. Targets (target, weight) as in `mse`.
SeparableLoss l1(Reduction reduction = Reduction::mean);

struct SmoothL1LossOptions {
  double beta = 1.0;  ///< 0 or more; 0 is the absolute error
  Reduction reduction = Reduction::mean;
};
SeparableLoss smooth_l1(SmoothL1LossOptions options = {});

struct HuberLossOptions {
  double delta = 1.0;  ///< above 0
  Reduction reduction = Reduction::mean;
};
/// Targets (target, weight) with weights of the outputs' shape are huber_loss(weight=...), whose
/// `mean` divides by the number of elements all the same.
SeparableLoss huber(HuberLossOptions options = {});

struct PoissonNLLLossOptions {
  bool log_input = true;
  bool full = false;
  double eps = 1e-8;
  Reduction reduction = Reduction::mean;
};
SeparableLoss poisson_nll(PoissonNLLLossOptions options = {});

struct GaussianNLLLossOptions {
  bool full = false;
  double eps = 1e-6;
  Reduction reduction = Reduction::mean;
};
/// Outputs (mean, variance) and a target, or outputs mean and targets (target, variance). The
/// variance has the mean's shape, or a last dimension less, or size 1 in one dimension, or none at
/// all (then shared).
/// \throws InvalidArgument where the variance has another shape or is negative anywhere (which, as
///         natively, waits for the device)
SeparableLoss gaussian_nll(GaussianNLLLossOptions options = {});

struct KLDivLossOptions {
  bool log_target = false;
  Reduction reduction = Reduction::mean;  ///< `batchmean` is allowed: divided by the samples
};
/// Outputs log-probabilities; targets probabilities, or their logarithms with `log_target`.
SeparableLoss kl_div(KLDivLossOptions options = {});

}  // namespace infinitybatch::losses
