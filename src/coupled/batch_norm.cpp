#include "coupled/batch_norm.hpp"

#include "core/sum_type.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace infinitybatch::coupled {
namespace {

// aten::batch_norm(input, weight?, bias?, running_mean?, running_var?, training, momentum, eps,
//                  cudnn_enabled)
enum BatchNormArgument : size_t {
  kInput,
  kWeight,
  kBias,
  kRunningMean,
  kRunningVar,
  kTraining,
  kMomentum,
  kEps,
  kCudnn
};

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

/// Statistics and γ, β of half precision inputs are fp32, as torch's kernels allow.
at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Statistics of channels against an input of shape (N, C, …).
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.size(0);
  return values.view(shape);
}

/// Where a size is 1 its stride says nothing, and a tensor may pass for both of torch's layouts.
/// The CPU kernel of batch_norm's backward then reads a gradient in one layout as if it were in the
/// other and gives wrong sums (torch 2.11 to 2.13). A micro-batch of a single sample meets this
/// where the whole batch does not, so the gradient gets the strides of the input there.
void lay_out_gradient(const at::Tensor& input, const at::Tensor& output) {
  const at::IntArrayRef sizes = input.sizes();
  if (std::find(sizes.begin(), sizes.end(), 1) == sizes.end()) return;
  output.register_hook([input](const at::Tensor& gradient) {
    if (gradient.strides() == input.strides()) return gradient;
    return at::empty_like(input, gradient.options()).copy_(gradient);
  });
}

/// Statistics, and sums of gradients, of so many micro-batches are added up together: few kernels
/// for each, and little that waits.
constexpr size_t kTogether = 8;

/// The same values without a kernel, and a leaf that is given a micro-batch's own gradient of them.
std::pair<at::Tensor, at::Tensor> tapped(const at::Tensor& values) {
  at::Tensor through = values.alias();
  at::Tensor leaf = values.detach();
  through.register_hook([leaf](const at::Tensor& gradient) { leaf.mutable_grad() = gradient; });
  return {std::move(through), std::move(leaf)};
}

}  // namespace

void BatchNorm::collect(Rows rows, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  wants_gradient_ = wants_gradient_ || arguments[kInput].toTensor().requires_grad();
  const at::Tensor input = arguments[kInput].toTensor().detach();
  const int64_t channels = input.size(1);
  if (!known_) {
    known_ = true;
    channels_ = channels;
    type_ = statistics_type(input);
    running_mean_ = tensor_or_none(arguments[kRunningMean]);
    running_var_ = tensor_or_none(arguments[kRunningVar]);
    momentum_ = arguments[kMomentum].toDouble();
    eps_ = arguments[kEps].toDouble();
  }
  // InstanceNorm written as a BatchNorm: samples stand in the channels, and nothing is coupled.
  const bool other_rows = input.size(0) == 0 || input.size(0) % rows.size() != 0;
  if (other_rows || channels_ != channels) {
    throw CouplingError("aten::batch_norm",
                        "aten::batch_norm in training mode runs on a tensor of shape " +
                            c10::str(input.sizes()) + " for " + std::to_string(rows.size()) +
                            " samples: its first dimension does not hold the samples, so it is "
                            "not known what it mixes; use instance_norm or group_norm");
  }
  if (rows.size() == 1 && !named_) {
    throw CouplingError("aten::batch_norm",
                        "aten::batch_norm without weight and running statistics runs on a single "
                        "sample: it cannot be told whether its channels hold samples; use "
                        "micro-batches of two samples or more");
  }
  // fp32 dummies make the kernel give fp32 statistics of a half precision input.
  if (input.scalar_type() != type_ && !dummy_.defined()) {
    dummy_ = at::zeros({channels}, input.options().dtype(type_));
  }
  const auto [mean, variance] =
      at::batch_norm_update_stats(input, dummy_, dummy_, /*momentum=*/0.0);
  merge(input.numel() / channels, mean, variance);
}

void BatchNorm::merge(int64_t count, const at::Tensor& mean, const at::Tensor& variance) {
  if (count != waiting_count_ || waiting_means_.size() == kTogether) merge_waiting();
  waiting_count_ = count;
  waiting_means_.push_back(mean);
  waiting_variances_.push_back(variance);
}

void BatchNorm::merge_waiting() {
  if (waiting_means_.empty()) return;
  const at::ScalarType type = sum_type(waiting_means_.front().device());
  const auto all = [&](std::vector<at::Tensor>& waiting) {
    return at::stack(std::exchange(waiting, {})).to(type);
  };
  const auto micro_batches = static_cast<int64_t>(waiting_means_.size());
  const int64_t count = waiting_count_ * micro_batches;
  const at::Tensor means = all(waiting_means_);
  const auto [between, mean] = at::var_mean(means, at::IntArrayRef({0}), /*unbiased=*/false);
  const at::Tensor squares =
      all(waiting_variances_).mean(0).add_(between).mul_(static_cast<double>(count));
  if (!mean_.defined()) {
    mean_ = mean;
    squares_ = squares;
    count_ = count;
    return;
  }
  const double total = static_cast<double>(count_ + count);
  const at::Tensor delta = mean - mean_;
  mean_.add_(delta, static_cast<double>(count) / total);
  squares_.add_(squares).addcmul_(delta, delta,
                                  static_cast<double>(count_) * static_cast<double>(count) / total);
  count_ += count;
}

void BatchNorm::combine(SettledBuffers& buffers) {
  const at::NoGradGuard no_grad;
  merge_waiting();
  zeros_ = at::zeros_like(mean_, mean_.options().dtype(type_));
  given_mean_ = mean_.to(type_);
  given_var_ = squares_.div(static_cast<double>(count_)).to(type_);
  if (running_mean_.defined()) update_running(buffers, running_mean_, mean_);
  if (running_var_.defined()) {
    update_running(buffers, running_var_, squares_.div(static_cast<double>(count_ - 1)));
  }
}

void BatchNorm::update_running(SettledBuffers& buffers, const at::Tensor& buffer,
                               const at::Tensor& value) {
  const at::Tensor before = buffers.current(buffer).to(value.scalar_type());
  buffers.settle(buffer, before.mul(1 - momentum_).add(value, momentum_).to(buffer.scalar_type()));
}

at::Tensor BatchNorm::apply(Rows /*rows*/, const Arguments& arguments,
                            std::vector<at::Tensor>& leaves) {
  const at::Tensor input = arguments[kInput].toTensor();
  at::Tensor weight = tensor_or_none(arguments[kWeight]);
  at::Tensor bias = tensor_or_none(arguments[kBias]);
  // Rows whose own input has no gradient have their share in the sums of the others'.
  const bool differentiable = c10::GradMode::is_enabled() && wants_gradient_;
  if (weight.defined()) {
    weight_ = weight.detach();
    weight = weight.to(type_);
  }
  if (bias.defined()) bias = bias.to(type_);
  if (differentiable) {
    // Their gradients are the two sums of this micro-batch: those of γ and β themselves may be
    // shared with other layers, or not be wanted.
    leaves.resize(2);
    const auto give = [&](at::Tensor& values, at::Tensor& leaf, double none) {
      if (values.defined() && values.requires_grad()) {
        std::tie(values, leaf) = tapped(values);
        return;
      }
      leaf = zeros_.detach().requires_grad_();
      values = values.defined() ? values + leaf : leaf + none;
    };
    give(weight, leaves[0], 1);
    give(bias, leaves[1], 0);
  }
  at::Tensor output =
      at::batch_norm(input, weight, bias, given_mean_, given_var_, /*training=*/false,
                     /*momentum=*/0.0, eps_, arguments[kCudnn].toBool());
  if (differentiable) lay_out_gradient(input.detach(), output);
  return output;
}

void BatchNorm::begin_backward(bool /*keep*/) {
  for (at::Tensor* gradient : {&sums_, &scale_, &shift_}) gradient->reset();
  waiting_gradients_.clear();
}

void BatchNorm::collect_gradient(Rows /*rows*/, const std::vector<at::Tensor>& leaves) {
  if (leaves.empty() || !leaves[0].grad().defined()) return;
  for (const at::Tensor& leaf : leaves) waiting_gradients_.push_back(leaf.grad());
  if (waiting_gradients_.size() == 2 * kTogether) add_waiting_gradients();
}

void BatchNorm::add_waiting_gradients() {
  if (waiting_gradients_.empty()) return;
  const at::NoGradGuard no_grad;
  const auto micro_batches = static_cast<int64_t>(waiting_gradients_.size()) / 2;
  const at::Tensor all = at::stack(std::exchange(waiting_gradients_, {}));
  at::Tensor sums = all.view({micro_batches, 2, channels_})
                        .sum(at::IntArrayRef({0}), /*keepdim=*/false, sum_type(all.device()));
  sums_ = sums_.defined() ? sums_.add_(sums) : sums;
}

void BatchNorm::combine_gradients(autograd::GradientSinks& /*sinks*/) {
  add_waiting_gradients();
  if (!sums_.defined()) return;
  const at::NoGradGuard no_grad;
  const double count = static_cast<double>(count_);
  const at::Tensor inverse = squares_.div(count).add(eps_).rsqrt();  // 1/σ
  const at::Tensor gain = weight_.defined() ? weight_.to(inverse.scalar_type()) * inverse : inverse;
  // dx = dy γ/σ + scale (x − μ) + shift
  scale_ = (gain * inverse * sums_[0]).div_(-count).to(type_);
  shift_ = (gain * sums_[1]).div_(-count).to(type_);
}

void BatchNorm::correct(Rows /*rows*/, size_t /*which*/, const at::Tensor& input,
                        at::Tensor& gradient) const {
  const at::NoGradGuard no_grad;
  const at::Tensor scale = along_channels(scale_, input);
  const at::Tensor shift = along_channels(shift_, input);
  at::Tensor missing = input.detach().sub(along_channels(given_mean_, input));
  if (gradient.defined() && gradient.scalar_type() == type_) {
    gradient.addcmul_(missing, scale).add_(shift);
    return;
  }
  at::addcmul_out(missing, shift, missing, scale);
  if (gradient.defined()) {
    gradient.add_(missing);
  } else {
    gradient = missing.to(input.scalar_type());
  }
}

}  // namespace infinitybatch::coupled
