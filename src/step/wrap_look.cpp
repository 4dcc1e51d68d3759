// The part of ForwardPass that compares rows of a larger batch with the same rows of a smaller one.
#include "wrap_cuts.hpp"
#include "wrap_forward.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/coupled/fixed_ops.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/execute/copied_batch.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace infinitybatch {

std::optional<std::vector<at::Tensor>> ForwardPass::try_gradients(
    const Batch& given, Rows rows, const std::vector<int64_t>& dims) {
  std::optional<std::vector<at::Tensor>> gradients;
  aside({0, rows.size()}, /*trial=*/true, [&] {
    const Batch inputs = wrote_inputs_ ? copied(given) : given;
    coupled::FixedOps fixed(call_->devices, rows.size(), watch_);
    const at::AutoGradMode recording(/*enabled=*/true);
    const Batch outputs = call_model(inputs, nullptr);
    const at::Tensor number = weighed(outputs, dims, {}, rows);
    if (!number.defined() || fixed.stood_in()) return;
    std::vector<at::Tensor> found = gradients_by(job_.parameters, number);
    if (!fixed.strayed()) gradients = std::move(found);
  });
  return gradients;
}

void ForwardPass::recount() {
  const int64_t here = row_counts_.front();
  const bool uneven = std::any_of(row_counts_.begin(), row_counts_.end(),
                                  [&](int64_t rows) { return rows != here; });
  if (uneven || !buffer_rule_.written()) return;
  const Rows rows = other_rows({0, here}, rows_.size);
  try {
    aside(rows, /*trial=*/false, [&] {
      const Batch micro = call_->micro_batch(rows);
      call_model(wrote_inputs_ ? copied(micro) : micro, nullptr);
      buffer_rule_.end_other_rows();
    });
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    // Nobody can tell.
  }
}

bool ForwardPass::looked() const noexcept {
  return looked_ || (call_->cuts && call_->cuts->looked());
}

void ForwardPass::look_at_rows() {
  if (call_->cuts) return call_->cuts->look_at_rows();
  if (!exact_ || row_counts_.empty() || watch_.talked()) return;
  if (coupled::FixedOps::at_work()) return;  // this call is part of a forward that is looked at
  const int64_t rows = *std::min_element(row_counts_.begin(), row_counts_.end());
  RowsSeen& known = call_->rows_seen;
  if (rows >= rows_.size) return;
  if (!known.due(rows_.size, rows)) return known.pass();
  looked_ = true;
  const bool again = known.looked > 0 && rows >= known.rows;
  if (!again) recount();
  RowLook look;
  look.batch_size = rows_.size;
  look.rows = rows;
  look.singles = rows == 1 && row_counts_.front() == 1;
  look.again = again;
  look.device = job_.device;
  if (high_water_) look.peak = room_for_a_look(high_water_->peak());
  look.load = [this](Rows part) { return call_->micro_batch(part); };
  look.run = [this](const Batch& inputs, int64_t count) { return try_forward(inputs, count); };
  // Calls without gradients exclude nobody, who may read parameters.
  MovedValues moved(recording_ ? job_.parameters : std::vector<NamedParameter>(),
                    recording_ ? buffer_rule_.written_buffers() : std::vector<at::Tensor>(),
                    watch_.memory());
  look.moved = &moved;
  if (own_backward_.value_or(false)) {
    look.gradients.emplace();
    look.gradients->run = [this](const Batch& inputs, Rows part, const std::vector<int64_t>& dims) {
      return try_gradients(inputs, part, dims);
    };
  }
  RowLook::Seen seen = look.find();
  if (seen.differs) throw rows_differ(seen, rows_.size, known);
  if (!seen.compared) return known.pass();
  known.note(rows_.size, rows, std::move(seen.dims));
}

}  // namespace infinitybatch
