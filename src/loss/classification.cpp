#include <infinitybatch/loss/classification.hpp>

#include "loss/arguments.hpp"
#include "loss/class_weights.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>

namespace infinitybatch::losses {
namespace {

/// N·d1·...: for probabilities of shape (N, C, d1, ...) the number of distributions.
DenominatorPart number_of_distributions(const std::string& name, const at::Tensor& targets) {
  if (targets.dim() < 2) {
    throw InvalidArgument(name + ": targets of shape " + shape_of(targets) +
                          " are floating point and so class probabilities, which have shape (N, C, "
                          "...); class indices must be integers");
  }
  return static_cast<double>(targets.numel()) / static_cast<double>(targets.size(1));
}

SeparableLoss::Denominator sum_of_weights(std::string name, Reduction reduction, at::Tensor weight,
                                          int64_t ignore_index) {
  if (reduction == Reduction::sum) return nullptr;
  return [name = std::move(name), weight = std::move(weight), ignore_index](
             const Batch& targets, int64_t) -> DenominatorPart {
    const at::Tensor& target = target_leaf(name, targets, 0).tensor;
    if (are_probabilities(target)) return number_of_distributions(name, target);
    return weight_of_indices(target, weight, ignore_index);
  };
}

/// Outputs have classes in dimension 1. Natively (C) would be one sample without a batch.
void check_classes(const std::string& name, const at::Tensor& input) {
  if (input.dim() >= 2) return;
  throw InvalidArgument(name + " takes outputs of shape (N, C, ...), but was given " +
                        shape_of(input) + "; a model with one output per sample wants " +
                        "binary_cross_entropy_with_logits");
}

at::Tensor cross_entropy_sum(const std::string& name, const CrossEntropyLossOptions& options,
                             const at::Tensor& input, const at::Tensor& target) {
  check_classes(name, input);
  return at::cross_entropy_loss(input, target, beside(options.weight, input), at::Reduction::Sum,
                                options.ignore_index, options.label_smoothing);
}

/// Under autocast torch itself chooses where cross entropy becomes fp32: on accelerators between
/// the logarithms and their sum. Widened before, the gradient would round otherwise than natively.
std::vector<at::Tensor> of_cross_entropy(const std::string& name, const Batch& outputs,
                                         const Batch& targets) {
  const Signature signature{"(input; target)"};
  std::vector<at::Tensor> tensors = raw_arguments(name, outputs, targets, signature);
  if (at::autocast::is_autocast_enabled(tensors[0].device().type())) return tensors;
  return arguments(name, outputs, targets, signature);
}

}  // namespace

SeparableLoss cross_entropy(CrossEntropyLossOptions options) {
  const std::string name = "cross_entropy";
  check_reduction(name, options.reduction);
  check_smoothing(name, options.label_smoothing);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = of_cross_entropy(name, outputs, targets);
    return cross_entropy_sum(name, options, tensors[0], tensors[1]);
  };
  return {name, std::move(sum),
          sum_of_weights(name, options.reduction, options.weight, options.ignore_index)};
}

SeparableLoss nll(NLLLossOptions options) {
  const std::string name = "nll_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, {"(input; target)"});
    check_classes(name, tensors[0]);
    return at::nll_loss_nd(tensors[0], tensors[1], beside(options.weight, tensors[0]),
                           at::Reduction::Sum, options.ignore_index);
  };
  return {name, std::move(sum),
          sum_of_weights(name, options.reduction, options.weight, options.ignore_index)};
}

SeparableLoss multi_margin(MultiMarginLossOptions options) {
  const std::string name = "multi_margin_loss";
  check_reduction(name, options.reduction);
  if (options.p != 1 && options.p != 2) {
    throw InvalidArgument(name + ": p must be 1 or 2, not " + std::to_string(options.p));
  }
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, {"(input; target)"});
    check_classes(name, tensors[0]);
    return at::multi_margin_loss(tensors[0], tensors[1], options.p, options.margin,
                                 beside(options.weight, tensors[0]), at::Reduction::Sum);
  };
  return {name, std::move(sum), count_samples(options.reduction)};
}

}  // namespace infinitybatch::losses
