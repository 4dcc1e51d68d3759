// The part of Executor that finds buffers which count samples (`self.seen += len(x)`).
#include <infinitybatch/execute/executor.hpp>

#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/rng.hpp>
#include <infinitybatch/execute/buffer_values.hpp>
#include <infinitybatch/tape/counts.hpp>

#include <exception>

namespace infinitybatch {

void Executor::recount() {
  const int64_t here = first_.size();
  const bool told = uneven_ || here == job_.batch_size() || wrote_inputs_ || cut_pass_;
  if (!asks_ || told || !buffers_.written()) return;
  const tape::Tape* tape = experiment_.tape();
  // Of micro-batches of one sample nothing is taken down: a 1 may count them.
  const bool may = buffers_.rebound() || here == 1 || (tape != nullptr && tape::may_count(*tape));
  if (!may) return;
  if (here == 1) *job_.examined = true;
  const RngSnapshot random = RngSnapshot::capture(devices_of(job_));
  const BufferValues values(job_.buffers);
  try {
    const Rows rows = other_rows(first_, job_.batch_size());
    load(rows);
    forward(rows);
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
    values.restore();  // nobody can tell
  }
  outputs_ = Batch();
  release();
  buffers_.end_other_rows();
  parameters_->end_micro_batch();
  random.restore();
}

}  // namespace infinitybatch
