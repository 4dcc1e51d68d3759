// The part of ForwardPass that compares rows of a larger batch with the same rows of a smaller one.
#include "wrap_forward.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {

void ForwardPass::look_at_rows() {
  if (!exact_ || row_counts_.empty() || watch_.talked() || wrote_inputs_) return;
  const int64_t rows = *std::min_element(row_counts_.begin(), row_counts_.end());
  if (rows >= rows_.size || (call_->looked != 0 && call_->looked <= rows)) return;
  RowLook look;
  look.batch_size = rows_.size;
  look.rows = rows;
  look.device = job_.device;
  if (high_water_) look.peak = room_for_a_look(high_water_->peak());
  look.load = [this](Rows part) { return call_->micro_batch(part); };
  look.run = [this](const Batch& inputs, int64_t count) { return try_forward(inputs, count); };
  RowLook::Seen seen = look.find();
  if (seen.differs) throw rows_differ(*seen.differs, rows_.size);
  call_->looked = rows;
  call_->output_dims = std::move(seen.dims);
}

}  // namespace infinitybatch
