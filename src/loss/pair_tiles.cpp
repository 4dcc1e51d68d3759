#include "loss/pair_tiles.hpp"

#include "loss/arguments.hpp"

#include <ATen/Functions.h>

#include <algorithm>

namespace infinitybatch::losses {
namespace {

constexpr double kLeastLength = 1e-12;  // as torch.nn.functional.normalize

/// (N, 1)
at::Tensor inverse_lengths(const at::Tensor& vectors) {
  return at::linalg_vector_norm(vectors, 2, at::IntArrayRef{1}, /*keepdim=*/true)
      .clamp_min_(kLeastLength)
      .reciprocal_();
}

/// As matrix products take it without a copy of their own in every tile.
at::Tensor in_rows(const at::Tensor& vectors) {
  return vectors.stride(1) == 1 && vectors.stride(0) >= vectors.size(1) ? vectors
                                                                        : vectors.contiguous();
}

}  // namespace

PairTiles::PairTiles(const at::Tensor& rows, const at::Tensor& columns,
                     const at::Tensor& temperature, bool normalize, int64_t tile, PairWants wants)
    : wants_(wants),
      self_(!columns.defined()),
      normalize_(normalize),
      tile_(tile),
      rows_(in_rows(widened(rows.detach()))),
      columns_(self_ ? rows_ : in_rows(widened(columns.detach()))),
      inverse_temperature_(temperature.reciprocal()) {
  if (normalize_) {
    column_inverse_ = inverse_lengths(columns_);
    row_inverse_ = self_ ? column_inverse_ : inverse_lengths(rows_);
    columns_ = in_rows(columns_.mul(column_inverse_));
  }
  const int64_t features = columns_.size(1);
  score_buffer_ = at::empty({tile_, columns_.size(0)}, options());
  scaled_buffer_ = at::empty({tile_, features}, options());
  if (normalize_ && !self_) unit_buffer_ = at::empty({tile_, features}, options());
  // The temperature's gradient is read from that of either side.
  if (wants_.rows || (wants_.temperature && !wants_.columns)) {
    row_gradient_ = at::zeros({rows_.size(0), features}, options());
  }
  if (wants_.columns && !self_) column_gradient_ = at::zeros(columns_.sizes(), options());
}

at::Tensor PairTiles::unit_rows(int64_t begin, int64_t end) {
  if (self_) return columns_.slice(0, begin, end);
  const at::Tensor rows = rows_.slice(0, begin, end);
  if (!normalize_) return rows;
  at::Tensor unit = unit_buffer_.slice(0, 0, end - begin);
  at::mul_out(unit, rows, row_inverse_.slice(0, begin, end));
  return unit;
}

at::Tensor PairTiles::scores(int64_t begin, int64_t end) {
  begin_ = begin;
  end_ = end;
  unit_ = unit_rows(begin, end);
  at::Tensor scaled = scaled_buffer_.slice(0, 0, end - begin);
  at::mul_out(scaled, unit_, inverse_temperature_);
  at::Tensor scores = score_buffer_.slice(0, 0, end - begin);
  at::mm_out(scores, scaled, columns_.t());
  return scores;
}

void PairTiles::backward(const at::Tensor& gradient) {
  if (row_gradient_.defined()) {
    row_gradient_.slice(0, begin_, end_).addmm_(gradient, columns_);
    if (self_) row_gradient_.addmm_(gradient.t(), unit_);
  }
  if (column_gradient_.defined()) column_gradient_.addmm_(gradient.t(), unit_);
}

/// Takes a gradient of vectors of length 1, without the temperature, back to the vectors as they
/// came, in place: g becomes (g - u (u · g)) / length · scale, where the length was at least the
/// least one.
/// \return sum of u · g, which is that of gradient times score times temperature
at::Tensor PairTiles::pull_back(at::Tensor& gradient, const at::Tensor& lengths, bool of_rows,
                                const at::Tensor& scale) {
  at::Tensor total = at::zeros({}, options().dtype(accumulation_type(gradient.device())));
  for (int64_t begin = 0; begin < gradient.size(0); begin += tile_) {
    const int64_t end = std::min(begin + tile_, gradient.size(0));
    at::Tensor part = gradient.slice(0, begin, end);
    const at::Tensor unit = of_rows ? unit_rows(begin, end) : columns_.slice(0, begin, end);
    at::Tensor product = scaled_buffer_.slice(0, 0, end - begin);
    at::mul_out(product, unit, part);
    at::Tensor along = product.sum(1, /*keepdim=*/true);
    total.add_(along.sum(total.scalar_type()));
    if (normalize_) {
      const at::Tensor inverse = lengths.slice(0, begin, end);
      along.masked_fill_(inverse.ge(1 / kLeastLength), 0);
      at::mul_out(product, unit, along);
      part.sub_(product).mul_(inverse);
    }
    part.mul_(scale);
  }
  return total;
}

PairGradients PairTiles::take(double factor) {
  PairGradients gradients;
  const at::Tensor scale = inverse_temperature_.mul(factor);
  at::Tensor along;
  if (column_gradient_.defined()) {
    along = pull_back(column_gradient_, column_inverse_, /*of_rows=*/false, scale);
    gradients.columns = std::move(column_gradient_);
  }
  if (row_gradient_.defined()) {
    along = pull_back(row_gradient_, row_inverse_, /*of_rows=*/true, scale);
    if (self_) along.div_(2);  // both sides' gradients are there
    if (wants_.rows) gradients.rows = std::move(row_gradient_);
  }
  if (wants_.temperature) {
    // d(u·v / t)/dt = -(u·v) / t²
    gradients.temperature = inverse_temperature_.square().mul_(along).mul_(-factor);
  }
  return gradients;
}

}  // namespace infinitybatch::losses
