#include "execute/row_checks.hpp"

#include "core/pinned_copies.hpp"
#include "execute/findings.hpp"

#include <utility>

namespace infinitybatch {

RowChecks::RowChecks(const Job& job, Forwards& forwards)
    : job_(job),
      forwards_(forwards),
      experiment_(job.asks_for_mixing() ? &job.findings->examined : nullptr,
                  job.asks_for_mixing() ? devices_of(job) : std::vector<at::Device>(),
                  job.batch_size()) {
  if (job.looks_at_rows() && job.findings->rows_seen.due(job.batch_size())) {
    watch_peak(high_water_, job.device);
  }
}

void RowChecks::stream(Rows rows) {
  if (!experiment_.wants(rows)) {
    forwards_.run(rows);
    return forwards_.check_coupling(rows);
  }
  forwards_.outputs = experiment_.record(rows, forwards_.inputs, forwards_.buffer_tensors(),
                                         [&] { return forwards_.call(rows); });
}

void RowChecks::look_at(Rows rows, const Batch& inputs, const tape::Tape& tape,
                        const Batch& outputs) {
  if (experiment_.awaits(rows)) {
    experiment_.meet_others(rows.size(), inputs, tape, outputs);
  } else if (experiment_.wants(rows)) {
    experiment_.take(rows, inputs, tape);
  }
}

void RowChecks::read_by_loss() {
  loss_known_ = true;
  experiment_.read_by_loss(whole_->read());
}

void RowChecks::examine() {
  forwards_.learn_numbers();
  count_rows();
  examine(/*last=*/false);
}

void RowChecks::examine(bool last) {
  // A rehearsal without the loss does not know which outputs it reads.
  const bool unknown = job_.coupled != nullptr && job_.outside == nullptr && !loss_known_;
  const auto load = [&](Rows rows) { return forwards_.rows_again(rows); };
  experiment_.run(load, last, /*sure=*/!unknown);
}

void RowChecks::look() {
  try {
    count_rows();
    examine(/*last=*/true);
    check_flattened_targets();
    compare_rows();
  } catch (const CouplingError&) {
    differ_ = std::current_exception();
  }
}

}  // namespace infinitybatch
