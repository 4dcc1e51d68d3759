#include <infinitybatch/loss/distance.hpp>

#include "loss/elementwise.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

namespace infinitybatch::losses {
namespace {

constexpr Signature kPair{"(x1, x2, target)", 3, 3, /*most_of_outputs=*/2};
constexpr Signature kTriplet{"(anchor, positive, negative) of one shape (N, ..., D)", 3, 3,
                             /*most_of_outputs=*/3};

/// One distance for each pair: leading dimensions of theirs, the samples' among them, then ones.
void check_distance(const std::string& name, const at::Tensor& distance, const at::Tensor& anchor) {
  int64_t leading = 0;
  while (leading < std::min(distance.dim(), anchor.dim()) &&
         distance.size(leading) == anchor.size(leading)) {
    ++leading;
  }
  bool good = leading > 0;
  for (int64_t dim = leading; dim < distance.dim(); ++dim) good = good && distance.size(dim) == 1;
  if (good) return;
  throw InvalidArgument(name + ": the distance of embeddings of shape " + shape_of(anchor) +
                        " has shape " + shape_of(distance) +
                        "; it must be taken pair by pair, without mixing samples: (N), or more of "
                        "their leading dimensions");
}

/// As in torch::nn::functional::triplet_margin_with_distance_loss; one loss for each distance.
at::Tensor triplet_losses(const std::string& name,
                          const TripletMarginWithDistanceLossOptions& options,
                          const std::vector<at::Tensor>& tensors) {
  const auto distance = [&](const at::Tensor& a, const at::Tensor& b) {
    if (!options.distance_function) return at::pairwise_distance(widened(a), widened(b));
    const at::Tensor result = options.distance_function(a, b);
    check_distance(name, result, a);
    return widened(result);
  };
  const at::Tensor to_positive = distance(tensors[0], tensors[1]);
  at::Tensor to_negative = distance(tensors[0], tensors[2]);
  if (options.swap) to_negative = at::minimum(to_negative, distance(tensors[1], tensors[2]));
  return to_positive.sub(to_negative).add(options.margin).clamp_min(0);
}

}  // namespace

SeparableLoss hinge_embedding(HingeEmbeddingLossOptions options) {
  check_reduction("hinge_embedding_loss", options.reduction);
  return elementwise(
      "hinge_embedding_loss", options.reduction,
      [margin = options.margin](const at::Tensor& input, const at::Tensor& target, int64_t kind) {
        return at::hinge_embedding_loss(input, target, margin, kind);
      });
}

SeparableLoss cosine_embedding(CosineEmbeddingLossOptions options) {
  const std::string name = "cosine_embedding_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, kPair);
    const char* signature = "(x1, x2, target) of shapes (N, D), (N, D), (N)";
    check_samples(name, {tensors[0], tensors[1]}, 2, signature);
    check_samples(name, {tensors[0].select(1, 0), tensors[2]}, 1, signature);
    return at::cosine_embedding_loss(tensors[0], tensors[1], tensors[2], options.margin,
                                     at::Reduction::Sum);
  };
  return {name, std::move(sum), count_samples(options.reduction)};
}

SeparableLoss margin_ranking(MarginRankingLossOptions options) {
  const std::string name = "margin_ranking_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, kPair);
    const Leaf& leaf = target_leaf(name, targets, 0);
    for (size_t i : {1, 2}) check_broadcast(name, tensors[0], tensors[i], leaf);
    const auto three = at::broadcast_tensors(tensors);
    const at::Tensor sum =
        at::margin_ranking_loss(three[0], three[1], three[2], options.margin, at::Reduction::Sum);
    return rescaled(sum, options.reduction, leaf.tensor.numel(), three[0].numel());
  };
  return {name, std::move(sum), count_elements(name, options.reduction)};
}

SeparableLoss triplet_margin(TripletMarginLossOptions options) {
  const std::string name = "triplet_margin_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = arguments(name, outputs, targets, kTriplet);
    check_samples(name, tensors, 2, kTriplet.text);
    const auto three = at::broadcast_tensors(tensors);
    const at::Tensor sum =
        at::triplet_margin_loss(three[0], three[1], three[2], options.margin, options.p,
                                options.eps, options.swap, at::Reduction::Sum);
    return rescaled(sum, options.reduction, three[0].size(0),
                    three[0].numel() / std::max<int64_t>(three[0].size(-1), 1));
  };
  return {name, std::move(sum), count_samples(options.reduction)};
}

SeparableLoss triplet_margin_with_distance(TripletMarginWithDistanceLossOptions options) {
  const std::string name = "triplet_margin_with_distance_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const auto tensors = raw_arguments(name, outputs, targets, kTriplet);
    check_samples(name, tensors, 2, kTriplet.text);
    const at::Tensor losses = triplet_losses(name, options, tensors);
    return rescaled(losses.sum(), options.reduction, tensors[0].size(0), losses.numel());
  };
  return {name, std::move(sum), count_samples(options.reduction)};
}

}  // namespace infinitybatch::losses
