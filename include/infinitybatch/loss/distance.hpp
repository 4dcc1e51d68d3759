#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

#include <functional>

namespace infinitybatch::losses {

// Criteria that compare embeddings within one sample. Those that compare samples with each other
// (contrastive, batch-hard) are coupled and not here. An embedding may come from the outputs or
// from the targets: only the order of all tensors counts.

struct HingeEmbeddingLossOptions {
  double margin = 1.0;
  Reduction reduction = Reduction::mean;
};
/// (distance; target), targets -1 or 1. Denominator of `mean`: the number of elements.
SeparableLoss hinge_embedding(HingeEmbeddingLossOptions options = {});

struct CosineEmbeddingLossOptions {
  double margin = 0.0;
  Reduction reduction = Reduction::mean;
};
/// (x1, x2; target) of shapes (N, D), (N, D), (N), targets -1 or 1. Denominator of `mean`: N.
SeparableLoss cosine_embedding(CosineEmbeddingLossOptions options = {});

struct MarginRankingLossOptions {
  double margin = 0.0;
  Reduction reduction = Reduction::mean;
};
/// (x1, x2; target) of one shape, targets -1 or 1. Denominator of `mean`: the number of elements.
SeparableLoss margin_ranking(MarginRankingLossOptions options = {});

struct TripletMarginLossOptions {
  double margin = 1.0;
  double p = 2.0;
  double eps = 1e-6;
  bool swap = false;
  Reduction reduction = Reduction::mean;
};
/// (anchor, positive, negative) of one shape (N, ..., D); the targets may have no tensor at all.
/// Denominator of `mean`: the number of triplets, N·....
SeparableLoss triplet_margin(TripletMarginLossOptions options = {});

struct TripletMarginWithDistanceLossOptions {
  /// Of two tensors (n, ...), pair by pair: (n), or leading dimensions of theirs, followed by any
  /// of size 1. Nothing: torch.pairwise_distance. It sees the outputs in their own precision.
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> distance_function = nullptr;
  double margin = 1.0;
  bool swap = false;
  Reduction reduction = Reduction::mean;
};
/// As `triplet_margin`. Denominator of `mean`: the number of distances.
/// \throws InvalidArgument where the distance has another shape: it might compare samples
SeparableLoss triplet_margin_with_distance(TripletMarginWithDistanceLossOptions options = {});

}  // namespace infinitybatch::losses
