#include "loss/elementwise.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

namespace infinitybatch::losses {
namespace {

/// The two tensors in one shape, where that leaves the samples alone.
std::vector<at::Tensor> broadcast(const std::string& name, const at::Tensor& input,
                                  const at::Tensor& target, const Leaf& leaf) {
  if (input.sizes() == target.sizes()) return {input, target};
  check_broadcast(name, input, target, leaf);
  return at::broadcast_tensors({input, target});
}

at::Tensor sum_of(const std::string& name, Reduction reduction, const PairLoss& loss,
                  const at::Tensor& input, const at::Tensor& target, const Leaf& leaf) {
  const std::vector<at::Tensor> pair = broadcast(name, input, target, leaf);
  return rescaled(loss(pair[0], pair[1], at::Reduction::Sum), reduction, leaf.tensor.numel(),
                  pair[0].numel());
}

at::Tensor weighted_sum_of(const std::string& name, Reduction reduction, WeightedMean mean,
                           const PairLoss& loss, const std::vector<at::Tensor>& tensors,
                           const Leaf& leaf) {
  const at::Tensor& input = tensors[0];
  const at::Tensor& weight = tensors[2];
  if (weight.sizes() != input.sizes()) {
    throw InvalidArgument(name + ": the weight of shape " + shape_of(weight) +
                          " must have the shape of the outputs, " + shape_of(input));
  }
  const std::vector<at::Tensor> pair = broadcast(name, input, tensors[1], leaf);
  const at::Tensor sum = loss(pair[0], pair[1], at::Reduction::None).mul(weight).sum();
  if (mean == WeightedMean::over_weights) return sum;
  return rescaled(sum, reduction, leaf.tensor.numel(), pair[0].numel());
}

}  // namespace

SeparableLoss elementwise(std::string name, Reduction reduction, PairLoss loss) {
  SeparableLoss::Denominator denominator = reduction == Reduction::batchmean
                                               ? count_samples(reduction)
                                               : count_elements(name, reduction);
  auto sum = [name, reduction, loss = std::move(loss)](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, {"(input; target)"});
    const Leaf& leaf = target_leaf(name, targets, 0);
    if (reduction == Reduction::batchmean && leaf.batch_dim != 0) {
      throw InvalidArgument(name + ": 'batchmean' divides by the size of dimension 0, but the " +
                            "samples of the targets are in dimension " +
                            std::to_string(leaf.batch_dim) + "; use 'sum' and divide it yourself");
    }
    return sum_of(name, reduction, loss, tensors[0], tensors[1], leaf);
  };
  return {std::move(name), std::move(sum), std::move(denominator)};
}

SeparableLoss weighted_elementwise(std::string name, Reduction reduction, WeightedMean mean,
                                   PairLoss loss) {
  check_reduction(name, reduction);
  SeparableLoss::Denominator denominator = count_elements(name, reduction);
  if (reduction == Reduction::mean && mean == WeightedMean::over_weights) {
    denominator = [name, count = std::move(denominator)](const Batch& targets,
                                                         int64_t samples) -> DenominatorPart {
      if (targets.tensors().size() < 2) return count(targets, samples);
      const at::Tensor& weight = target_leaf(name, targets, 1).tensor;
      return weight.sum(accumulation_type(weight.device()));
    };
  }
  auto sum = [name, reduction, mean, loss = std::move(loss)](const Batch& outputs,
                                                             const Batch& targets) {
    const auto tensors =
        arguments(name, outputs, targets, {"(input; target) or (input; target, weight)", 2, 3});
    const Leaf& leaf = target_leaf(name, targets, 0);
    return tensors.size() == 2 ? sum_of(name, reduction, loss, tensors[0], tensors[1], leaf)
                               : weighted_sum_of(name, reduction, mean, loss, tensors, leaf);
  };
  return {std::move(name), std::move(sum), std::move(denominator)};
}

}  // namespace infinitybatch::losses
