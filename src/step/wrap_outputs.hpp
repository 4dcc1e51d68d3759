#pragma once

#include "execute/pass.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <vector>

namespace infinitybatch {

/// Outputs of all micro-batches as one batch. `batch_dim` of each leaf says how it was made:
/// `kShared` for one number, reduced over the micro-batches, and for what stands once.
struct JoinedOutputs {
  Batch whole;
  std::vector<bool> once;  ///< for each leaf: the same for any samples, as in OutputLaw
  Reduce reduce = Reduce::none;
  int64_t rows = 0;

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
/// \throws BatchError naming the leaf that cannot be joined
JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const std::vector<bool>& from_samples, const std::vector<int64_t>& known_dims,
                   const WrapOptions& options);

}  // namespace infinitybatch
