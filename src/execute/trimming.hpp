#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// A logical batch whose rows are sorted by length, longest first, and are computed without the
/// padding that all rows of a micro-batch have. To the engine it is a batch like any other: inputs
/// lose their padding when a micro-batch is loaded, and outputs get it back, as a value that the
/// model gave there, when forward returns. Losses, callbacks and callers see the rows in the
/// caller's order.
class Trimming {
 public:
  /// A dimension that is as long as its sequence.
  struct Along {
    size_t leaf = 0;
    int64_t dim = 0;
    bool operator==(const Along&) const = default;
  };

  /// Along which dimensions outputs follow a sequence, as rows have shown that are padded so.
  struct Outputs {
    bool left = false;
    std::vector<Along> along;
    /// For each of these what the model itself gave at a padded position: whatever a loss takes
    /// from there has to show, as it would natively.
    std::vector<double> fills;
    std::vector<Along> asked;   ///< `Sequence::inputs`, before rows were compared
    std::vector<Along> inputs;  ///< and afterwards
  };

  /// What is padded together.
  struct Sequence {
    int64_t full = 0;              ///< positions, padding included
    bool left = false;             ///< padding stands in front
    std::vector<int64_t> lengths;  ///< of each row, sorted
    std::vector<Along> inputs;     ///< what is trimmed
    std::vector<Along> unsure;     ///< of these what may be as long by chance
    std::vector<Along> targets;
    std::optional<Outputs> outputs;  ///< once it was looked for
  };

  std::vector<Sequence> sequences;
  std::vector<int64_t> sizes;  ///< of micro-batches, in rows; empty until a plan says
  std::vector<int64_t> order;  ///< sorted row i is row `order[i]` of the caller's
  bool reorders = false;       ///< somewhere these two differ
  Rows at_work;                ///< whose targets were loaded last
  /// Micro-batches are planned by what they take at each length: whether anything is cut off or
  /// not, all do the same to memory.
  bool planned = false;
  int64_t at_least = 0;  ///< then: positions of the micro-batch at work, whatever its rows have
  /// Whether micro-batches are what they would be without it.
  bool changes_nothing() const;
  /// Whether outputs of inputs that are trimmed can be padded back.
  bool knows_outputs() const;

  /// That these rows are computed at: of the longest of them.
  int64_t length(const Sequence& sequence, Rows rows) const;
  bool trims(const Sequence& sequence, Rows rows) const {
    return length(sequence, rows) < sequence.full;
  }
  /// A few rows that are trimmed, of as many lengths: where sizes are known, what micro-batches are
  /// trimmed to. \param turn others, where there are more
  std::vector<int64_t> trimmed_rows(const Sequence& sequence, int64_t turn = 0) const;

  /// \param batch those rows, in full
  Batch inputs(const Batch& batch, Rows rows) const;
  Batch targets(const Batch& batch, Rows rows) const;
  /// Along one sequence alone.
  static Batch inputs(const Batch& batch, const Sequence& sequence, int64_t length);
  /// \param inputs that the model ran on
  /// \throws BatchError for outputs of another length
  Batch padded(const Batch& outputs, const Batch& inputs) const;

  /// Sorted row i is row `rows[i]` of the caller's.
  void sort_by(std::vector<int64_t> rows);
  /// Rows of the caller's batch sorted; and back.
  Batch sorted(const Batch& batch) const;
  Batch unsorted(const Batch& batch) const;
  at::Tensor unsorted(const at::Tensor& tensor, int64_t dim) const;
  /// The caller's rows, of rows that are sorted.
  std::vector<int64_t> samples(Rows rows) const;

  /// Whether outputs leaf `leaf` is padded back.
  bool pads(size_t leaf) const;
  /// \param gradient of outputs leaf `leaf`, of these rows or, without, of all
  /// \throws BatchError where it says that the loss has read padding
  void check_gradient(size_t leaf, int64_t batch_dim, const at::Tensor& gradient,
                      std::optional<Rows> rows = std::nullopt) const;

 private:
  Batch trimmed(const Batch& batch, Rows rows, std::vector<Along> Sequence::* along) const;
  std::vector<int64_t> back_;  // the other way than `order`
};

}  // namespace infinitybatch
