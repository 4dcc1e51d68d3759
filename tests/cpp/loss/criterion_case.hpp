#pragma once

#include <infinitybatch/loss/criteria.hpp>

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// One criterion in one of its hard cases: how to feed it, what torch says, and our loss.
namespace infinitybatch::testing {

namespace F = torch::nn::functional;

/// Draws reproducible targets. Numbers are drawn in float64 on the host and cast, so that every
/// type sees the same ones.
class Draw {
 public:
  Draw(int64_t samples, at::TensorOptions options, uint64_t seed)
      : samples_(samples),
        options_(options),
        generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

  int64_t samples() const { return samples_; }
  const at::TensorOptions& options() const { return options_; }

  /// (N, shape...) of the options' type
  at::Tensor normal(std::vector<int64_t> shape) {
    return at::randn(rows(std::move(shape)), generator_, at::kDouble).to(options_);
  }
  at::Tensor uniform(std::vector<int64_t> shape, double low = 0, double high = 1) {
    return at::rand(rows(std::move(shape)), generator_, at::kDouble)
        .mul(high - low)
        .add(low)
        .to(options_);
  }
  /// Distributions over dimension 1.
  at::Tensor probabilities(std::vector<int64_t> shape) {
    return at::randn(rows(std::move(shape)), generator_, at::kDouble).softmax(1).to(options_);
  }
  /// -1 or 1
  at::Tensor signs(std::vector<int64_t> shape) {
    return integers(0, 2, std::move(shape)).mul(2).sub(1).to(options_);
  }
  /// int64 in [low, high)
  at::Tensor integers(int64_t low, int64_t high, std::vector<int64_t> shape) {
    return at::randint(low, high, rows(std::move(shape)), generator_, at::TensorOptions(at::kLong))
        .to(options_.device());
  }

 private:
  std::vector<int64_t> rows(std::vector<int64_t> shape) const {
    shape.insert(shape.begin(), samples_);
    return shape;
  }

  int64_t samples_;
  at::TensorOptions options_;
  at::Generator generator_;
};

/// A row of the table. All functions are pure; tensors that a criterion owns (weights) are made
/// anew in the type and on the device asked for.
struct CriterionCase {
  /// torch's functional name, a slash, what is hard about it: "nll_loss/ignored_mean".
  std::string name;
  /// Numbers that `head` wants for each sample.
  int64_t features = 0;
  /// (n, features) of any model -> outputs that the criterion accepts (probabilities where it wants
  /// probabilities), each sample for itself, differentiable. Leaves know their batch dimension.
  std::function<Batch(const at::Tensor& features)> head;
  /// Targets for N samples; may have no tensor at all.
  std::function<Batch(Draw& draw)> targets;
  /// torch's loss over the whole batch.
  std::function<at::Tensor(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& targets)>
      native;
  /// Ours, with weights of these options.
  std::function<SeparableLoss(const at::TensorOptions& options)> loss;
  /// The native loss is inf or NaN here, and so are gradients.
  bool finite = true;
};

using Tensors = std::vector<at::Tensor>;

// ---- heads ------------------------------------------------------------------------------------

/// (n, features) -> (n, shape...)
inline std::function<Batch(const at::Tensor&)> reshaped(std::vector<int64_t> shape) {
  return [shape](const at::Tensor& features) {
    std::vector<int64_t> sizes = shape;
    sizes.insert(sizes.begin(), features.size(0));
    return Batch(features.reshape(sizes));
  };
}

/// The same, log-probabilities over dimension 1.
inline std::function<Batch(const at::Tensor&)> log_probabilities(std::vector<int64_t> shape) {
  return [head = reshaped(std::move(shape))](const at::Tensor& features) {
    return Batch(head(features).tensor().log_softmax(1));
  };
}

/// The same, each number in (0, 1).
inline std::function<Batch(const at::Tensor&)> probabilities(std::vector<int64_t> shape) {
  return [head = reshaped(std::move(shape))](const at::Tensor& features) {
    return Batch(head(features).tensor().sigmoid());
  };
}

/// `count` tensors (n, shape...) of equal size as a tuple.
inline std::function<Batch(const at::Tensor&)> several(int64_t count, std::vector<int64_t> shape) {
  return [count, head = reshaped(std::move(shape))](const at::Tensor& features) {
    std::vector<Batch> children;
    for (const at::Tensor& part : features.chunk(count, 1)) children.push_back(head(part));
    return Batch::tuple(std::move(children));
  };
}

// ---- pieces of rows ---------------------------------------------------------------------------

/// Weights 0.5, 0.8, ..., of `shape`.
inline at::Tensor weights(std::vector<int64_t> shape, const at::TensorOptions& options) {
  const int64_t count = c10::multiply_integers(shape);
  return at::arange(count, at::kDouble).mul(0.3).add(0.5).reshape(shape).to(options);
}

inline const char* suffix(Reduction reduction) {
  switch (reduction) {
    case Reduction::mean:
      return "_mean";
    case Reduction::sum:
      return "_sum";
    default:
      return "_batchmean";
  }
}

/// torch's options with our reduction, mean or sum.
template <typename TorchOptions>
TorchOptions with_reduction(TorchOptions options, Reduction reduction) {
  if (reduction == Reduction::mean) {
    options.reduction(torch::kMean);
  } else {
    options.reduction(torch::kSum);
  }
  return options;
}

inline at::Tensor reduced(const at::Tensor& losses, Reduction reduction) {
  return reduction == Reduction::mean ? losses.mean() : losses.sum();
}

inline constexpr Reduction kMeanAndSum[] = {Reduction::mean, Reduction::sum};

}  // namespace infinitybatch::testing
