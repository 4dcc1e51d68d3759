#include <infinitybatch/loss/linear_cross_entropy.hpp>

#include "loss/arguments.hpp"
#include "loss/class_weights.hpp"
#include "loss/head_tiles.hpp"
#include "loss/known_gradients.hpp"
#include "loss/tiles.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace infinitybatch::losses {
namespace {

const std::string kLinearCrossEntropy = "linear_cross_entropy";

void check(const at::Tensor& weight, const at::Tensor& bias, const CrossEntropyLossOptions& options,
           const LinearHeadOptions& head) {
  check_reduction(kLinearCrossEntropy, options.reduction);
  check_smoothing(kLinearCrossEntropy, options.label_smoothing);
  check_tile(kLinearCrossEntropy, head.tile);
  if (!(head.softcap >= 0)) {
    throw InvalidArgument(kLinearCrossEntropy + ": softcap must be above 0, or 0 for none, not " +
                          std::to_string(head.softcap));
  }
  if (!weight.defined() || weight.dim() < 2 || !weight.is_floating_point()) {
    throw InvalidArgument(kLinearCrossEntropy +
                          " needs a floating point linear_weight of shape (C, ..., "
                          "features)" +
                          (weight.defined() ? ", but was given " + shape_of(weight) : ""));
  }
  if (bias.defined() && bias.sizes() != weight.sizes().slice(0, weight.dim() - 1)) {
    throw InvalidArgument(kLinearCrossEntropy + ": linear_bias has shape " + shape_of(bias) +
                          ", which must be that of linear_weight " + shape_of(weight) +
                          " without the last dimension");
  }
  if (options.weight.defined() && options.weight.numel() != weight.size(0)) {
    throw InvalidArgument(kLinearCrossEntropy + ": weight has shape " + shape_of(options.weight) +
                          ", but there are " + std::to_string(weight.size(0)) + " classes");
  }
}

/// A head as a number of plain ones beside each other, which is one if linear_weight is (C, F).
struct Heads {
  at::Tensor hidden;  // (R, F)
  at::Tensor weight;  // (C, K, F)
  at::Tensor bias;    // (C, K), or undefined
  at::Tensor target;  // (R, K) int64, or (R, C, K) probabilities

  at::Tensor target_of(int64_t head) const { return target.select(target.dim() - 1, head); }
};

Heads heads_of(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
               const at::Tensor& target) {
  const int64_t classes = weight.size(0);
  const int64_t features = weight.size(-1);
  const at::IntArrayRef inner = weight.sizes().slice(1, weight.dim() - 2);
  const bool plain = inner.empty();
  const bool probabilities = are_probabilities(target);
  if (input.dim() < 2 || input.size(-1) != features || (!plain && input.dim() != 2)) {
    throw InvalidArgument(kLinearCrossEntropy + " takes outputs (N, " + (plain ? "..., " : "") +
                          "features) for " + "a linear_weight of shape " + shape_of(weight) +
                          ", but was given " + shape_of(input));
  }
  std::vector<int64_t> expected = input.sizes().slice(0, input.dim() - 1).vec();
  if (probabilities) expected.push_back(classes);
  expected.insert(expected.end(), inner.begin(), inner.end());
  if (target.sizes() != at::IntArrayRef(expected)) {
    throw InvalidArgument(kLinearCrossEntropy + " takes targets of shape " +
                          shape_of(at::empty(expected, at::kMeta)) + " beside outputs " +
                          shape_of(input) + " and linear_weight " + shape_of(weight) +
                          ", but was given " + shape_of(target) + " of " +
                          c10::toString(target.scalar_type()));
  }
  const int64_t count = c10::multiply_integers(inner);
  const int64_t rows = input.numel() / std::max<int64_t>(features, 1);
  Heads heads;
  heads.hidden = input.reshape({rows, features});
  heads.weight = weight.reshape({classes, count, features});
  if (bias.defined()) heads.bias = bias.reshape({classes, count});
  heads.target = probabilities ? target.reshape({rows, classes, count})
                               : target.to(at::kLong).reshape({rows, count});
  return heads;
}

/// As autocast would for at::linear: anything but float64.
at::Tensor as_autocast(const at::Tensor& tensor) {
  const at::DeviceType device = tensor.device().type();
  if (tensor.scalar_type() == at::kDouble || !at::autocast::is_autocast_enabled(device)) {
    return tensor;
  }
  return tensor.to(at::autocast::get_autocast_dtype(device));
}

/// In the words of torch's own cross entropy. On accelerators kernels find it, as they do there:
/// asking would wait.
void check_labels(const at::Tensor& target, int64_t classes, int64_t ignore_index) {
  if (!target.is_cpu()) return;
  const at::Tensor wrong = target.masked_select(
      target.lt(0).logical_or_(target.ge(classes)).logical_and_(target.ne(ignore_index)));
  if (wrong.numel() == 0) return;
  TORCH_CHECK_INDEX(false, "Target ", wrong[0].item<int64_t>(), " is out of bounds.");
}

void check_devices(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& target) {
  for (const at::Tensor& other : {weight, bias, target}) {
    if (!other.defined() || other.device() == input.device()) continue;
    throw InvalidArgument(kLinearCrossEntropy + ": outputs are on " + input.device().str() +
                          ", but linear_weight, linear_bias or targets on " + other.device().str());
  }
}

/// The sum over all targets, with its graph.
at::Tensor sum_of_losses(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                         const at::Tensor& target, const CrossEntropyLossOptions& options,
                         const LinearHeadOptions& head) {
  check_devices(input, weight, bias, target);
  const bool of_input = wants_gradient(input);
  const bool of_weight = wants_gradient(weight);
  const bool of_bias = wants_gradient(bias);
  at::Tensor value, nothing_counts;
  HeadGradients whole;
  {
    const at::NoGradGuard no_grad;
    const Heads heads = heads_of(input, weight, bias, target);
    const at::Tensor weights = as_autocast(heads.weight);
    HeadJob job;
    job.hidden = as_autocast(heads.hidden).contiguous();
    if (job.hidden.scalar_type() != weights.scalar_type()) {
      throw InvalidArgument(
          kLinearCrossEntropy + ": outputs of type " + c10::toString(job.hidden.scalar_type()) +
          " do not go with a linear_weight of type " + c10::toString(weights.scalar_type()));
    }
    const NoAutocast no_autocast;
    if (!are_probabilities(target)) {
      check_labels(heads.target, weight.size(0), options.ignore_index);
      nothing_counts = heads.target.eq(options.ignore_index).all();
    }
    const int64_t count = weights.size(1);
    const at::TensorOptions exact = widened(at::empty({0}, job.hidden.options())).options();
    if (options.weight.defined()) job.class_weight = options.weight.reshape({-1}).to(exact);
    job.ignore_index = options.ignore_index;
    job.label_smoothing = options.label_smoothing;
    job.softcap = head.softcap;
    // Summed over heads in full precision; with one there is nothing to sum.
    if (of_input) {
      whole.hidden = at::zeros(heads.hidden.sizes(), count == 1 ? input.options() : exact);
    }
    if (of_weight) whole.weight = at::zeros(weights.sizes(), exact);
    if (of_bias) whole.bias = at::zeros(heads.bias.sizes(), exact);

    std::optional<HeadTiles> tiles;
    for (int64_t i = 0; i < count; ++i) {
      job.weight = weights.select(1, i);
      if (heads.bias.defined()) job.bias = heads.bias.select(1, i).to(exact);
      job.target = heads.target_of(i);
      HeadGradients part{whole.hidden, of_weight ? whole.weight.select(1, i) : at::Tensor(),
                         of_bias ? whole.bias.select(1, i) : at::Tensor()};
      if (!tiles) {
        tiles.emplace(
            job,
            rows_of_tile(kLinearCrossEntropy, head.tile, job.hidden.size(0), weights.size(0),
                         weights.size(2), static_cast<int64_t>(exact.dtype().itemsize())),
            whole.any());
      }
      const at::Tensor sum = tiles->add(job, part);
      value = value.defined() ? value.add_(sum) : sum;
    }
    if (!value.defined()) value = at::zeros({}, exact);
    value = value.to(exact.dtype().toScalarType());
    if (of_input) whole.hidden = whole.hidden.reshape(input.sizes());
    if (of_weight) whole.weight = whole.weight.reshape(weight.sizes());
    if (of_bias) whole.bias = whole.bias.reshape(bias.sizes());
  }
  return with_gradients(kLinearCrossEntropy.c_str(), value, {input, weight, bias},
                        {whole.hidden, whole.weight, whole.bias}, nothing_counts);
}

DenominatorPart denominator(const at::Tensor& target, int64_t classes,
                            const CrossEntropyLossOptions& options) {
  if (!are_probabilities(target)) {
    return weight_of_indices(target, options.weight, options.ignore_index);
  }
  return static_cast<double>(target.numel()) / static_cast<double>(classes);
}

}  // namespace

SeparableLoss linear_cross_entropy(at::Tensor linear_weight, at::Tensor linear_bias,
                                   CrossEntropyLossOptions options, LinearHeadOptions head) {
  check(linear_weight, linear_bias, options, head);
  SeparableLoss::Denominator part;
  if (options.reduction == Reduction::mean) {
    part = [options, classes = linear_weight.size(0)](const Batch& targets, int64_t) {
      return denominator(target_leaf(kLinearCrossEntropy, targets, 0).tensor, classes, options);
    };
  }
  auto sum = [options = std::move(options), head, weight = std::move(linear_weight),
              bias = std::move(linear_bias)](const Batch& outputs, const Batch& targets) {
    const auto tensors = raw_arguments(kLinearCrossEntropy, outputs, targets, {"(input; target)"});
    return sum_of_losses(tensors[0], weight, bias, tensors[1], options, head);
  };
  return {kLinearCrossEntropy, std::move(sum), std::move(part)};
}

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight,
                                const at::Tensor& target, const at::Tensor& linear_bias,
                                const CrossEntropyLossOptions& options,
                                const LinearHeadOptions& head) {
  check(linear_weight, linear_bias, options, head);
  if (!input.defined() || !target.defined()) {
    throw InvalidArgument(kLinearCrossEntropy + " takes an input and targets");
  }
  const at::Tensor sum = sum_of_losses(input, linear_weight, linear_bias, target, options, head);
  if (options.reduction == Reduction::sum) return sum;
  const DenominatorPart part = denominator(target, linear_weight.size(0), options);
  if (const double* number = std::get_if<double>(&part)) return sum.div(*number);
  return sum.div(std::get<at::Tensor>(part).to(sum.options()));
}

}  // namespace infinitybatch::losses
