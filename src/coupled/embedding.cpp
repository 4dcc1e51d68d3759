#include "coupled/embedding.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>

namespace infinitybatch::coupled {
namespace {

// aten::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
enum EmbeddingArgument : size_t { kTable, kIndices, kPadding, kScale, kSparse };

// aten::embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, sparse,
//                     per_sample_weights, include_last_offset[, padding_idx])
struct Bag {
  explicit Bag(const WholeBatchOp::Arguments& arguments)
      : weight(arguments[0].toTensor()),
        indices(arguments[1].toTensor().reshape({-1})),
        offsets(arguments[2].toTensor()),
        mode(arguments[4].toInt()),
        sparse(arguments[5].toBool()),
        include_last_offset(arguments[7].toBool()) {
    if (arguments[6].isTensor() && arguments[6].toTensor().defined()) {
      weights = arguments[6].toTensor();
    }
    if (arguments.size() > 8 && arguments[8].isInt()) padding = arguments[8].toInt();
  }

  at::Tensor sum(const at::Tensor& of, int64_t in_mode,
                 const std::optional<at::Tensor>& by_weights) const {
    return std::get<0>(at::embedding_bag(of, indices, offsets, /*scale_grad_by_freq=*/false,
                                         in_mode, sparse, by_weights, include_last_offset,
                                         padding));
  }

  /// For each index one over how many count in its bag.
  at::Tensor mean_weights(const at::TensorOptions& options) const {
    const int64_t bags = offsets.size(0) - (include_last_offset ? 1 : 0);
    const at::Tensor begins = offsets.narrow(0, 0, bags).to(at::kLong).contiguous();
    const at::Tensor bag =
        at::searchsorted(begins, at::arange(indices.size(0), begins.options()), /*out_int32=*/false,
                         /*right=*/true) -
        1;
    const at::Tensor counted =
        padding ? indices.ne(*padding).to(at::kLong) : at::ones_like(indices, at::kLong);
    const at::Tensor sizes = at::zeros({bags}, begins.options()).index_add(0, bag, counted);
    return sizes.index_select(0, bag).clamp_min(1).to(options.dtype()).reciprocal();
  }

  at::Tensor weight, indices, offsets;
  int64_t mode;
  bool sparse;
  std::optional<at::Tensor> weights;  // per_sample_weights
  bool include_last_offset;
  std::optional<int64_t> padding;
};

constexpr int64_t kSum = 0, kMean = 1;

}  // namespace

void ScaledEmbedding::collect(Rows /*rows*/, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const at::Tensor indices = arguments[kIndices].toTensor().detach().reshape({-1}).to(at::kLong);
  if (!counts_.defined()) {
    counts_ = at::zeros({arguments[kTable].toTensor().size(0)}, indices.options());
  }
  counts_.index_add_(0, indices, at::ones_like(indices));
}

void ScaledEmbedding::combine(SettledBuffers& /*buffers*/) {}

at::Tensor ScaledEmbedding::apply(Rows /*rows*/, const Arguments& arguments,
                                  std::vector<at::Tensor>& /*leaves*/) {
  const at::Tensor weight = arguments[kTable].toTensor();
  const at::Tensor indices = arguments[kIndices].toTensor();
  const at::Tensor words = at::embedding(weight, indices, arguments[kPadding].toInt(),
                                         /*scale_grad_by_freq=*/false, arguments[kSparse].toBool());
  if (!words.requires_grad()) return words;
  const at::Tensor fixed = words.detach();
  const at::Tensor share = counts_.index_select(0, indices.reshape({-1}).to(at::kLong))
                               .to(words.scalar_type())
                               .reciprocal()
                               .reshape(indices.sizes())
                               .unsqueeze(-1);
  // The words themselves, to the bit, with a share of their gradient.
  return fixed + (words - fixed) * share;
}

void ScaledEmbeddingBag::collect(Rows /*rows*/, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const Bag bag(arguments);
  if (bag.mode != kSum && bag.mode != kMean) {
    throw CouplingError("aten::embedding_bag",
                        "aten::embedding_bag with scale_grad_by_freq knows the modes sum and mean, "
                        "not " +
                            std::to_string(bag.mode));
  }
  indices_.push_back(bag.indices.detach());
  weight_ = bag.weight.options().requires_grad(false);
  words_ = bag.weight.size(0);
  padding_ = bag.padding;
}

void ScaledEmbeddingBag::combine(SettledBuffers& /*buffers*/) {
  const at::NoGradGuard no_grad;
  const at::Tensor indices = at::cat(std::exchange(indices_, {}));
  const at::Tensor counts =
      at::zeros({words_}, indices.options().dtype(at::kLong))
          .index_add_(0, indices.to(at::kLong), at::ones_like(indices, at::kLong));
  // One bag of numbers, each with a gradient of one.
  const at::Tensor numbers = at::ones({words_, 1}, weight_.dtype(at::kDouble));
  const at::Tensor offsets = at::zeros({1}, indices.options());
  const auto [sum, bags, sizes, largest] =
      at::_embedding_bag(numbers, indices, offsets, /*scale_grad_by_freq=*/true, kSum,
                         /*sparse=*/false, /*per_sample_weights=*/{},
                         /*include_last_offset=*/false, padding_.value_or(-1));
  const at::Tensor gradient =
      at::_embedding_bag_backward(at::ones_like(sum), indices, offsets, bags, sizes, largest,
                                  words_, /*scale_grad_by_freq=*/true, kSum, /*sparse=*/false,
                                  /*per_sample_weights=*/{}, padding_.value_or(-1))
          .squeeze(1);
  // A whole number, as it divides.
  const at::Tensor divisor = (counts / gradient).round_();
  share_ =
      at::where(gradient > 0, divisor.reciprocal(), at::ones_like(divisor)).to(weight_.dtype());
}

at::Tensor ScaledEmbeddingBag::apply(Rows /*rows*/, const Arguments& arguments,
                                     std::vector<at::Tensor>& /*leaves*/) {
  const Bag bag(arguments);
  // The value, and the gradient of `per_sample_weights`, which nobody scales.
  const at::Tensor value = bag.sum(bag.weight.detach(), bag.mode, bag.weights);
  if (!bag.weight.requires_grad() || !c10::GradMode::is_enabled()) return value;
  at::Tensor shares = share_.index_select(0, bag.indices.to(at::kLong));
  if (bag.mode == kMean) shares = shares * bag.mean_weights(shares.options());
  if (bag.weights) shares = shares * bag.weights->detach().reshape({-1});
  const at::Tensor scaled = bag.sum(bag.weight, kSum, shares);
  // Adds nothing but a gradient.
  return value + (scaled - scaled.detach());
}

}  // namespace infinitybatch::coupled
