#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>

namespace infinitybatch::losses {

/// What a linear head with a cross entropy is computed from. Tensors without graph.
struct HeadJob {
  at::Tensor hidden;        ///< (R, F), of the type in which products are computed
  at::Tensor weight;        ///< (C, F), of that type
  at::Tensor bias;          ///< (C) of the scores' type, or undefined
  at::Tensor target;        ///< (R) int64, or (R, C) probabilities
  at::Tensor class_weight;  ///< (C) of the scores' type, or undefined
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double softcap = 0;  ///< above 0, or none
};

/// Where gradients of the sum are added; undefined where not wanted.
struct HeadGradients {
  at::Tensor hidden;  ///< (R, F)
  at::Tensor weight;  ///< (C, F) of the scores' type
  at::Tensor bias;    ///< (C) of the scores' type

  bool any() const { return hidden.defined() || weight.defined() || bias.defined(); }
};

/// Goes through the rows of a head a tile at a time. The buffers serve every job of one shape; how
/// often memory is asked for does not depend on the number of tiles, so that two traces of other
/// sizes tell one story to the planner.
class HeadTiles {
 public:
  /// \param tile rows whose scores are held at once
  HeadTiles(const HeadJob& job, int64_t tile, bool wants_gradients);

  /// The sum of the rows' losses, 0-dimensional, in float64 where the device has it.
  at::Tensor add(const HeadJob& job, HeadGradients& gradients);

 private:
  struct Targets;

  /// Of the rows from `begin` to `end`: scores in `scores_`, and the slope of the cap.
  void make_scores(const HeadJob& job, int64_t begin, int64_t end);
  /// Losses of the tile; leaves exp(score - largest) and its sums.
  void reduce(const HeadJob& job, Targets& targets, int64_t begin, int64_t end);
  /// Turns what `reduce` left into the gradient of the scores, but for a factor for each row.
  void differentiate(Targets& targets, int64_t begin, int64_t end);
  void add_gradients(const HeadJob& job, int64_t begin, int64_t end, HeadGradients& gradients);

  const int64_t tile_;
  at::Tensor scores_;  // (tile, C)
  at::Tensor slope_;   // (tile, C), with a cap
  // Numbers as tensors: an op makes a new one of each plain number that it is given.
  at::Tensor softcap_, one_;
  at::Tensor probabilities_;  // (tile, C), with such targets
  at::Tensor product_;        // (tile, F)
  // Of one column: what each row has one of. `factor_` is what its gradient lacks.
  at::Tensor largest_, sum_, picked_, share_, factor_;
  // As scores_, product_ and the weight, in the products' type where that is another.
  at::Tensor narrow_scores_, narrow_product_, narrow_weight_;
};

}  // namespace infinitybatch::losses
