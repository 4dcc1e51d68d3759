#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <optional>
#include <string>

namespace infinitybatch::losses {

/// Which gradients are wanted.
struct PairWants {
  bool rows = false;
  bool columns = false;
  bool temperature = false;

  bool any() const { return rows || columns || temperature; }
};

struct PairGradients {
  at::Tensor rows, columns, temperature;  ///< undefined where not wanted
};

/// The scores of every row with every column, made and differentiated a tile of rows at a time:
/// a_i · b_j / temperature. Nothing here is seen by autograd.
///
/// What it holds: copies of half precision embeddings in float32, the columns at length 1 where
/// lengths are divided out, the gradients, one tile of scores, and rows of one tile.
class PairTiles {
 public:
  /// \param rows        (N, D)
  /// \param columns     (M, D); undefined: the rows themselves, whose two gradients are then added
  ///                    up in `rows`
  /// \param temperature 0-dimensional, of the type that scores are computed in
  PairTiles(const at::Tensor& rows, const at::Tensor& columns, const at::Tensor& temperature,
            bool normalize, int64_t tile, PairWants wants);

  int64_t rows() const { return rows_.size(0); }
  int64_t columns() const { return columns_.size(0); }
  int64_t tile() const { return tile_; }
  /// The scores' type and device.
  at::TensorOptions options() const { return columns_.options(); }

  /// (end - begin, M), in memory that the next call uses again; the caller may write there.
  at::Tensor scores(int64_t begin, int64_t end);
  /// Adds to the gradients what `gradient` of the scores of `scores(begin, end)`, just asked for,
  /// gives. It may be the same memory.
  void backward(const at::Tensor& gradient);
  /// All gradients times `factor`; to be asked for once.
  PairGradients take(double factor);

 private:
  at::Tensor unit_rows(int64_t begin, int64_t end);
  at::Tensor pull_back(at::Tensor& gradient, const at::Tensor& lengths, bool of_rows,
                       const at::Tensor& scale);

  PairWants wants_;
  bool self_;
  bool normalize_;
  int64_t tile_;
  int64_t begin_ = 0, end_ = 0;
  at::Tensor rows_, columns_;                // columns at length 1 where wanted, rows as they came
  at::Tensor row_inverse_, column_inverse_;  // (N, 1): 1 / length; undefined where not wanted
  at::Tensor inverse_temperature_;
  at::Tensor score_buffer_, unit_buffer_, scaled_buffer_;
  at::Tensor unit_;  // the tile's rows
  at::Tensor row_gradient_, column_gradient_;
};

}  // namespace infinitybatch::losses
