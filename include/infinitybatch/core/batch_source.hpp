#pragma once

#include <infinitybatch/core/batch.hpp>

#include <functional>

namespace infinitybatch {

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
  /// signature have rows of the same shapes. Empty means that all sources of this object are alike.
  std::string signature;

  /// \throws BatchError as `batch_size(batch, name)`
  static BatchSource from(const Batch& batch, std::string_view name);
};

}  // namespace infinitybatch
