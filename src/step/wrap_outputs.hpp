#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/execute/two_pass.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <vector>

namespace infinitybatch {

/// Outputs of all micro-batches as one batch. `batch_dim` of each leaf says how it was made:
/// `kShared` for one number, reduced over the micro-batches.
struct JoinedOutputs {
  Batch whole;
  Reduce reduce = Reduce::none;
  int64_t rows = 0;

  /// What stands for these rows in leaf `index`, of the outputs themselves or of their gradient.
  at::Tensor part_of_gradient(size_t index, const at::Tensor& gradient, Rows part) const;
};

/// Whether micro-batches of other sizes would tell along which dimension outputs lie.
bool is_ambiguous(const Batch& outputs, int64_t rows, const WrapOptions& options);

/// \throws BatchError naming the leaf that cannot be joined
JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const WrapOptions& options);

}  // namespace infinitybatch
