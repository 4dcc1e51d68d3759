#include <infinitybatch/loss/regression.hpp>

#include "loss/elementwise.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <numbers>

namespace infinitybatch::losses {
namespace {

/// The variance in a shape that broadcasts against `mean`, by the rules of torch's
/// gaussian_nll_loss.
at::Tensor checked_variance(const at::Tensor& mean, const at::Tensor& variance) {
  if (variance.sizes() == mean.sizes()) return variance;
  if (variance.dim() == 0) return variance.expand_as(mean);
  if (variance.sizes() == mean.sizes().slice(0, static_cast<size_t>(mean.dim() - 1))) {
    return variance.unsqueeze(-1);
  }
  int64_t of_size_1 = 0;
  int64_t other = variance.dim() == mean.dim() ? 0 : 1;
  for (int64_t dim = 0; other == 0 && dim < mean.dim(); ++dim) {
    if (variance.size(dim) == mean.size(dim)) continue;
    (variance.size(dim) == 1 ? of_size_1 : other) += 1;
  }
  if (other == 0 && of_size_1 == 1) return variance;
  throw InvalidArgument("gaussian_nll_loss: a variance of shape " + shape_of(variance) +
                        " does not fit a mean of shape " + shape_of(mean) +
                        "; give it the mean's shape, or size 1 in one dimension");
}

/// What torch.nn.functional.gaussian_nll_loss computes, which has no counterpart in C++. The clamp
/// is hidden from autograd, so that the gradient goes on where the variance is below `eps`.
at::Tensor gaussian_nll_sum(const at::Tensor& mean, const at::Tensor& target,
                            const at::Tensor& given, const GaussianNLLLossOptions& options) {
  at::Tensor variance = checked_variance(mean, given);
  if (variance.lt(0).any().item<bool>()) {
    throw InvalidArgument(
        "gaussian_nll_loss: the variance is negative somewhere; end the model with softplus or "
        "exp");
  }
  variance = variance.clone();
  {
    const at::NoGradGuard no_grad;
    variance.clamp_(options.eps);
  }
  at::Tensor loss = variance.log().add(mean.sub(target).square().div(variance)).mul(0.5);
  if (options.full) loss = loss.add(0.5 * std::log(2 * std::numbers::pi));
  return loss.sum();
}

}  // namespace

SeparableLoss mse(Reduction reduction) {
  return weighted_elementwise("mse_loss", reduction, WeightedMean::over_weights,
                              [](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
                                return at::mse_loss(input, target, kind);
                              });
}

SeparableLoss l1(Reduction reduction) {
  return weighted_elementwise("l1_loss", reduction, WeightedMean::over_weights,
                              [](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
                                return at::l1_loss(input, target, kind);
                              });
}

SeparableLoss smooth_l1(SmoothL1LossOptions options) {
  check_reduction("smooth_l1_loss", options.reduction);
  return elementwise(
      "smooth_l1_loss", options.reduction,
      [beta = options.beta](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
        return at::smooth_l1_loss(input, target, kind, beta);
      });
}

SeparableLoss huber(HuberLossOptions options) {
  return weighted_elementwise(
      "huber_loss", options.reduction, WeightedMean::over_elements,
      [delta = options.delta](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
        return at::huber_loss(input, target, kind, delta);
      });
}

SeparableLoss poisson_nll(PoissonNLLLossOptions options) {
  check_reduction("poisson_nll_loss", options.reduction);
  return elementwise("poisson_nll_loss", options.reduction,
                     [options](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
                       return at::poisson_nll_loss(input, target, options.log_input, options.full,
                                                   options.eps, kind);
                     });
}

SeparableLoss gaussian_nll(GaussianNLLLossOptions options) {
  const std::string name = "gaussian_nll_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(
        name, outputs, targets,
        {"(mean, variance; target) or (mean; target, variance)", 3, 3, /*most_of_outputs=*/2});
    const bool predicted = outputs.tensors().size() == 2;  // the variance comes from the model
    const at::Tensor& mean = tensors[0];
    const at::Tensor& target = tensors[predicted ? 2 : 1];
    const Leaf& leaf = target_leaf(name, targets, 0);
    check_broadcast(name, mean, target, leaf);
    const std::vector<at::Tensor> pair = at::broadcast_tensors({mean, target});
    return rescaled(gaussian_nll_sum(pair[0], pair[1], tensors[predicted ? 1 : 2], options),
                    options.reduction, leaf.tensor.numel(), pair[0].numel());
  };
  return {name, std::move(sum), count_elements(name, options.reduction)};
}

SeparableLoss kl_div(KLDivLossOptions options) {
  return elementwise("kl_div", options.reduction,
                     [log_target = options.log_target](const at::Tensor& input,
                                                       const at::Tensor& target, int64_t kind) {
                       return at::kl_div(input, target, kind, log_target);
                     });
}

}  // namespace infinitybatch::losses
