#include "execute/row_checks.hpp"

#include "core/pinned_copies.hpp"
#include "execute/findings.hpp"

#include <utility>

namespace infinitybatch {

RowChecks::RowChecks(const Setup& setup, Forwards& forwards)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      forwards_(forwards),
      experiment_(asks_for_mixing(setup) ? &setup.resources.findings->examined : nullptr,
                  asks_for_mixing(setup) ? devices_of(setup.problem) : std::vector<at::Device>(),
                  setup.problem.batch_size()) {
  if (setup.problem.looks_at_rows() &&
      setup.resources.findings->rows_seen.due(setup.problem.batch_size())) {
    watch_peak(high_water_, setup.problem.device);
  }
}

/// Whether recordings are asked whether ordinary ops mix samples, where that is not known.
bool RowChecks::asks_for_mixing(const Setup& setup) {
  return setup.problem.exact_coupling && setup.strategy.replays();
}

bool RowChecks::asks(Rows rows) const {
  if (experiment_.wants(rows) || experiment_.awaits(rows) || learns_output_law(rows)) return true;
  const bool known = !problem_.exact_coupling || resources_.findings->examined;
  return !known && rows.begin == 0 && rows.size() > 1 && rows.size() < problem_.batch_size();
}

bool RowChecks::learns_output_law(Rows rows) const {
  return problem_.loss.coupled() != nullptr && !problem_.rehearses &&
         resources_.findings->output_law.leaves.empty() && rows.begin == 0 &&
         rows.size() < problem_.batch_size();
}

void RowChecks::stream(Rows rows) {
  if (!experiment_.wants(rows)) {
    forwards_.run(rows);
    return forwards_.check_coupling(rows);
  }
  forwards_.outputs = experiment_.record(rows, forwards_.inputs, buffers_of(problem_),
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
  const bool unknown = problem_.loss.coupled() != nullptr && !loss_known_;
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
