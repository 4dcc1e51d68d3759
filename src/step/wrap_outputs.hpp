#pragma once

#include "execute/pass.hpp"
#include "step/own_losses.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <map>
#include <vector>

namespace infinitybatch {

/// Outputs of all micro-batches as one batch. `batch_dim` of each leaf says how it was made:
/// `kShared` for one number, reduced over the micro-batches, and for what stands once.
struct JoinedOutputs {
  Batch whole;
  std::vector<bool> once;  ///< for each leaf: the same for any samples, as in OutputLaw
  /// For each leaf that is one number, by the first row of a micro-batch: what its number counts in
  /// that of all. Empty for other leaves.
  std::vector<std::map<int64_t, at::Tensor>> shares;

  /// The gradient of leaf `index` that is these rows'; undefined where it is another micro-batch's.
  at::Tensor part_of_gradient(size_t index, const at::Tensor& gradient, Rows part) const;
};

/// Whether micro-batches of other sizes would tell along which dimension outputs lie, or that they
/// lie along none.
/// \param from_samples for each leaf, see tape::from_samples; empty where nothing was recorded
/// \param known_dims   see `RowsSeen::dims`
bool is_ambiguous(const Batch& outputs, int64_t rows, const std::vector<bool>& from_samples,
                  const std::vector<int64_t>& known_dims, const WrapOptions& options);

/// \param from_samples as above, of all micro-batches that were recorded
/// \param known_dims   see `RowsSeen::dims`
/// \param losses       of each part, for each leaf; empty where nobody knows
/// \param inputs       of the call, for what is said of an output that cannot be joined
/// \throws BatchError naming the leaf that cannot be joined
JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const std::vector<bool>& from_samples, const std::vector<int64_t>& known_dims,
                   const std::vector<std::vector<OwnLoss>>& losses, const WrapOptions& options,
                   const BatchSource& inputs);

/// What each part's number counts in the number of all: 1 for a sum, and its share of the weights
/// for a mean. Parts that weigh nothing count nothing.
/// \param losses of each part; weights are rows where they are not known
/// \return empty where nobody knows, nor says by `reduce`, what the numbers are
std::vector<at::Tensor> shares_of(const std::vector<OwnLoss>& losses,
                                  const std::vector<int64_t>& row_counts, Reduce reduce);

/// The number of all.
at::Tensor reduced(const std::vector<at::Tensor>& numbers, const std::vector<at::Tensor>& shares);

}  // namespace infinitybatch
