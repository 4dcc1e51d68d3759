#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace infinitybatch {

/// In place of a dimension: each sample has several rows in the first one, and those of all samples
/// are interleaved (row place * samples + n), as where [time, batch] is flattened.
inline constexpr int64_t kInterleaved = -2;
/// Likewise: of other numbers of rows it has the same values, as a temperature has that is returned
/// beside what it scales.
inline constexpr int64_t kOnce = -3;

/// What looks at rows have told of a kind of batch. Steps that are split are counted, and rows are
/// looked at in steps 1, 2, 4, 8, 16, ...: warm-ups end, settings change, and a first batch may be
/// too regular to show anything. So are batches and micro-batches that are smaller than any so far.
struct RowsSeen {
  int64_t rows = 0;  ///< of the smallest micro-batch that was compared with a larger one; 0: none
  /// Along which samples lie in each leaf of outputs; or `kInterleaved`, `kOnce`; -1: not known.
  std::vector<int64_t> dims;
  int64_t steps = 0;    ///< so far
  int64_t looked = 0;   ///< the last of them that could compare any; 0: none
  int64_t samples = 0;  ///< of the smallest batch that was looked at
  /// Rows that a look on an accelerator may foresee to have room for: more had none.
  int64_t most = std::numeric_limits<int64_t>::max();

  /// Whether the step at work, with so many samples, looks whatever its micro-batches are.
  bool due(int64_t batch_size) const noexcept {
    return batch_size < samples || (steps & (steps + 1)) == 0;
  }
  /// Whether it looks, with micro-batches of no fewer than `least` rows.
  bool due(int64_t batch_size, int64_t least) const noexcept {
    return due(batch_size) || least < rows;
  }
  /// The step at work has ended without a look, or nobody could tell.
  void pass() noexcept { ++steps; }
  /// It has looked, and found nothing.
  void note(int64_t batch_size, int64_t least, std::vector<int64_t> found);
};

}  // namespace infinitybatch
