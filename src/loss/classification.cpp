#include <infinitybatch/loss/classification.hpp>

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

#include "arguments.hpp"

namespace infinitybatch::losses {
namespace {

/// How many of the targets belong to each class, in a type that can be multiplied with weights.
/// Counted by adding ones, not by bincount, which waits for the device; the sums are integers and
/// exact in any order. 17 bytes for each target while it runs.
at::Tensor class_counts(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  const at::Tensor index = targets.reshape(-1);
  const at::Tensor counted = index.ne(ignore_index);
  return at::zeros({classes}, index.options())
      .index_add_(0, index.mul(counted), counted.to(at::kLong));
}

/// The sum of weight[target] over the targets that are not ignored.
DenominatorPart weight_of_indices(const at::Tensor& targets, const at::Tensor& weight,
                                  int64_t ignore_index) {
  const at::Tensor index = targets.to(at::kLong);  // uint8 has no -100
  if (!weight.defined()) return index.ne(ignore_index).sum();
  at::Tensor counts = class_counts(index, weight.numel(), ignore_index);
  // Host and device meet on the device: copies towards it wait for nothing. What travels is small,
  // the classes' counts or weights.
  const at::Device device = counts.is_cpu() ? weight.device() : counts.device();
  const at::ScalarType type = accumulation_type(device);
  counts = counts.to(device, type, /*non_blocking=*/!device.is_cpu());
  const at::Tensor weights = weight.reshape(-1).to(device, type, /*non_blocking=*/!device.is_cpu());
  // A class that is not there counts nothing, whatever its weight: no 0·inf.
  return counts.mul(weights).masked_fill(counts.eq(0), 0).sum();
}

bool are_probabilities(const at::Tensor& targets) {
  return targets.is_floating_point();
}

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

void check_smoothing(const std::string& name, double label_smoothing) {
  if (label_smoothing >= 0 && label_smoothing <= 1) return;
  throw InvalidArgument(name + ": label_smoothing must be between 0 and 1, not " +
                        std::to_string(label_smoothing));
}

at::Tensor cross_entropy_sum(const std::string& name, const CrossEntropyLossOptions& options,
                             const at::Tensor& input, const at::Tensor& target) {
  check_classes(name, input);
  return at::cross_entropy_loss(input, target, beside(options.weight, input), at::Reduction::Sum,
                                options.ignore_index, options.label_smoothing);
}

}  // namespace

SeparableLoss cross_entropy(CrossEntropyLossOptions options) {
  const std::string name = "cross_entropy";
  check_reduction(name, options.reduction);
  check_smoothing(name, options.label_smoothing);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, {"(input; target)"});
    return cross_entropy_sum(name, options, tensors[0], tensors[1]);
  };
  return {name, std::move(sum),
          sum_of_weights(name, options.reduction, options.weight, options.ignore_index)};
}

SeparableLoss linear_cross_entropy(at::Tensor linear_weight, at::Tensor linear_bias,
                                   CrossEntropyLossOptions options) {
  const std::string name = "linear_cross_entropy";
  check_reduction(name, options.reduction);
  check_smoothing(name, options.label_smoothing);
  if (!linear_weight.defined() || linear_weight.dim() < 2) {
    throw InvalidArgument(name + " needs a linear_weight of shape (C, ..., features)");
  }
  std::vector<int64_t> logits_shape = linear_weight.sizes().vec();
  logits_shape.pop_back();
  if (linear_bias.defined() && linear_bias.sizes() != logits_shape) {
    throw InvalidArgument(name + ": linear_bias has shape " + shape_of(linear_bias) +
                          ", which must be that of linear_weight " + shape_of(linear_weight) +
                          " without the last dimension");
  }
  logits_shape.insert(logits_shape.begin(), -1);
  auto sum = [name, options, logits_shape, weight = std::move(linear_weight),
              bias = std::move(linear_bias)](const Batch& outputs, const Batch& targets) {
    const auto tensors = raw_arguments(name, outputs, targets, {"(input; target)"});
    check_samples(name, {tensors[0]}, 2, "outputs (N, features)");
    const at::Tensor logits =
        at::linear(tensors[0], weight.flatten(0, -2), bias.defined() ? bias.flatten() : bias)
            .reshape(logits_shape);
    return cross_entropy_sum(name, options, widened(logits), widened(tensors[1]));
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
