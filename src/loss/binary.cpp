#include <infinitybatch/loss/binary.hpp>

#include "loss/elementwise.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

namespace infinitybatch::losses {
namespace {

/// A weight from the options or, with the samples, from the targets; undefined where there is none.
at::Tensor chosen_weight(const std::string& name, const char* option, const at::Tensor& fixed,
                         const std::vector<at::Tensor>& tensors, size_t position,
                         const Leaf& target, const char* as_target) {
  const at::Tensor& input = tensors[0];
  if (tensors.size() <= position) {
    check_weight(name, option, fixed, input, target, as_target);
    return beside(fixed, input);
  }
  if (fixed.defined()) {
    throw InvalidArgument(name + ": " + option +
                          " was given twice, in the options and with the targets");
  }
  check_broadcast(name, input, tensors[position], target);
  return tensors[position];
}

void check_same_shape(const std::string& name, const at::Tensor& input, const at::Tensor& target) {
  if (input.sizes() == target.sizes()) return;
  throw InvalidArgument(name + " takes targets of the outputs' shape " + shape_of(input) +
                        ", but was given " + shape_of(target));
}

/// The number of rows of classes in (N, ..., C).
int64_t distributions(const at::Tensor& target) {
  return target.numel() / std::max<int64_t>(target.size(-1), 1);
}

/// As in torch::nn::functional::multilabel_soft_margin_loss, which ATen doesn't have: the loss of
/// each distribution is the mean over its classes.
at::Tensor multilabel_soft_margin_losses(const at::Tensor& input, const at::Tensor& target,
                                         const at::Tensor& weight) {
  at::Tensor loss = target.mul(at::log_sigmoid(input))
                        .add(target.neg().add(1).mul(at::log_sigmoid(input.neg())))
                        .neg();
  if (weight.defined()) loss = loss.mul(weight);
  return loss.sum(-1).div(input.size(-1));
}

}  // namespace

SeparableLoss binary_cross_entropy(BCELossOptions options) {
  const std::string name = "binary_cross_entropy";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors =
        arguments(name, outputs, targets, {"(input; target) or (input; target, weight)", 2, 3});
    const at::Tensor& input = tensors[0];
    check_same_shape(name, input, tensors[1]);
    at::Tensor weight = chosen_weight(name, "weight", options.weight, tensors, 2,
                                      target_leaf(name, targets, 0), "(target, weight)");
    if (weight.defined()) weight = weight.expand(at::infer_size(input.sizes(), weight.sizes()));
    return at::binary_cross_entropy(input, tensors[1], weight, at::Reduction::Sum);
  };
  return {name, std::move(sum), count_elements(name, options.reduction)};
}

SeparableLoss binary_cross_entropy_with_logits(BCEWithLogitsLossOptions options) {
  const std::string name = "binary_cross_entropy_with_logits";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets,
                                   {"(input; target), (input; target, weight) or (input; target, "
                                    "weight, pos_weight)",
                                    2, 4});
    check_same_shape(name, tensors[0], tensors[1]);
    const Leaf& leaf = target_leaf(name, targets, 0);
    const at::Tensor weight =
        chosen_weight(name, "weight", options.weight, tensors, 2, leaf, "(target, weight)");
    const at::Tensor pos_weight = chosen_weight(name, "pos_weight", options.pos_weight, tensors, 3,
                                                leaf, "(target, weight, pos_weight)");
    return at::binary_cross_entropy_with_logits(tensors[0], tensors[1], weight, pos_weight,
                                                at::Reduction::Sum);
  };
  return {name, std::move(sum), count_elements(name, options.reduction)};
}

SeparableLoss soft_margin(Reduction reduction) {
  check_reduction("soft_margin_loss", reduction);
  return elementwise("soft_margin_loss", reduction,
                     [](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
                       return at::soft_margin_loss(input, target, kind);
                     });
}

SeparableLoss multilabel_margin(Reduction reduction) {
  const std::string name = "multilabel_margin_loss";
  check_reduction(name, reduction);
  auto sum = [name](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, {"(input; target)"});
    check_samples(name, tensors, 2, "(input; target) of shape (N, C)");
    return at::multilabel_margin_loss(tensors[0], tensors[1], at::Reduction::Sum);
  };
  return {name, std::move(sum), count_samples(reduction)};
}

SeparableLoss multilabel_soft_margin(MultiLabelSoftMarginLossOptions options) {
  const std::string name = "multilabel_soft_margin_loss";
  check_reduction(name, options.reduction);
  SeparableLoss::Denominator denominator;
  if (options.reduction == Reduction::mean) {
    denominator = [name](const Batch& targets, int64_t) -> DenominatorPart {
      return static_cast<double>(distributions(target_leaf(name, targets, 0).tensor));
    };
  }
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors =
        arguments(name, outputs, targets, {"(input; target) or (input; target, weight)", 2, 3});
    const Leaf& leaf = target_leaf(name, targets, 0);
    check_samples(name, {tensors[0], tensors[1]}, 2, "(input; target) of shape (N, ..., C)");
    check_broadcast(name, tensors[0], tensors[1], leaf);
    const at::Tensor weight =
        chosen_weight(name, "weight", options.weight, tensors, 2, leaf, "(target, weight)");
    const at::Tensor losses = multilabel_soft_margin_losses(tensors[0], tensors[1], weight);
    return rescaled(losses.sum(), options.reduction, distributions(leaf.tensor), losses.numel());
  };
  return {name, std::move(sum), std::move(denominator)};
}

}  // namespace infinitybatch::losses
