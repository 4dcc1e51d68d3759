#pragma once

#include <infinitybatch/core/batch.hpp>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch {

/// Sizes of the dimensions that are not split, for each leaf that is a tensor.
using Dims = std::vector<std::vector<int64_t>>;

Dims dims_of(const Batch& batch);

/// A logical batch that need not exist as one tensor: its size, and a way to make any rows of it.
///
///     BatchSource images{1'000'000, [&](int64_t begin, int64_t end) { return read(begin, end); }};
///
/// `rows` may be called several times for the same rows (denominators, restarts) and must give the
/// same values each time.
struct BatchSource {
  int64_t size = 0;
  std::function<Batch(int64_t begin, int64_t end)> rows;
  /// What distinguishes this kind of batch from others for the planner: two sources with the same
  /// signature have leaves of the same types and ranks. Empty means that all sources of this object
  /// are alike.
  std::string signature = {};  // initialised, so that leaving it out is no warning
  /// Sizes of the dimensions that are not split, leaf by leaf: how long a sample is. Of the first
  /// row, where not all are alike.
  Dims dims = {};
  /// Whether every row has these sizes.
  bool uniform = false;
  /// Leaves that are no tensors, as text that other ones would not have. Empty without any, and
  /// where nobody knows.
  std::string arguments = {};

  /// \throws BatchError as `batch_size(batch, name)`
  static BatchSource from(const Batch& batch, std::string_view name);
};

}  // namespace infinitybatch
