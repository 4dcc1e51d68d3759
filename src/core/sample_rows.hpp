#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

namespace infinitybatch {

/// A view in which samples have a dimension of their own: of several places for each sample, time
/// and batch are two.
/// \param like how samples lie in `tensor`
at::Tensor with_samples_apart(const at::Tensor& tensor, const Leaf& like);
/// Which dimension that is.
inline int64_t sample_dim(const Leaf& like) {
  return like.places > 1 && like.interleaved ? like.batch_dim + 1 : like.batch_dim;
}

/// `change(tensor, dim)` with samples apart along `dim`.
template <typename Change>
at::Tensor change_samples(const at::Tensor& tensor, const Leaf& like, const Change& change) {
  if (like.places == 1) return change(tensor, like.batch_dim);
  return change(with_samples_apart(tensor, like), sample_dim(like))
      .flatten(like.batch_dim, like.batch_dim + 1);
}

/// The rows `order` of a tensor along `dim`, and of all leaves of a batch that have samples.
at::Tensor in_order(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& order);
Batch in_order(const Batch& batch, const std::vector<int64_t>& order);

/// Each `step`-th row, from the first on; views, unless samples are interleaved.
Batch every(const Batch& batch, int64_t step);

/// Of a tensor what these samples have. A view, unless they are interleaved.
at::Tensor rows_of(const at::Tensor& tensor, const Leaf& like, Rows part);

}  // namespace infinitybatch
