// The part of RowChecks that finds out how a model's outputs follow its samples.
#include "core/out_of_memory.hpp"
#include "core/plain_leaves.hpp"
#include "coupled/row_errors.hpp"
#include "execute/findings.hpp"
#include "execute/row_checks.hpp"
#include "tape/sample_flow.hpp"

#include <infinitybatch/core/errors.hpp>

#include <exception>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

OutputForm form_of(const Batch& outputs, int64_t rows, const tape::Tape& tape, const Batch& inputs,
                   at::Device device) {
  OutputForm form{outputs, rows, tape::from_samples(tape, inputs), tape.opaque};
  form.from_samples.resize(outputs.leaves().size(), true);  // nothing was recorded
  for (Leaf& leaf : form.outputs.leaves()) {
    if (leaf.tensor.defined()) leaf.tensor = leaf.tensor.detach().to(device);
  }
  return form;
}

/// Of one sample any dimension may be as long as that, and nothing else is in doubt.
bool only_ambiguous(const OutputForm& form) {
  if (form.rows > 1 || has_plain_numbers(form.outputs)) return false;
  for (size_t i = 0; i < form.outputs.leaves().size(); ++i) {
    if (form.outputs.leaves()[i].tensor.defined() && !form.from_samples[i]) return false;
  }
  return true;
}

}  // namespace

void RowChecks::learn_outputs(Rows rows, const Batch& inputs, const Batch& outputs,
                              const tape::Tape& tape) {
  const at::Device device = problem_.loss.coupled()->device().value_or(problem_.device);
  const OutputForm form = form_of(outputs, rows.size(), tape, inputs, device);
  if (!needs_other_rows(form)) {
    resources_.findings->output_law = find_output_law(form, nullptr);
    return;
  }
  const int64_t end = problem_.batch_size();
  if (only_ambiguous(form)) {
    std::optional<OutputForm> two;
    try {
      if (!forwards_.wrote_inputs()) two = form_elsewhere({0, 2}, device);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
      // No room for two: samples lie first, as is the convention.
    }
    resources_.findings->output_law = find_output_law(form, two ? &*two : nullptr);
    return;
  }
  if (end % rows.size() != 0) return whole_->know_sources(form.from_samples, form.why);
  // Other samples, too.
  const OutputForm other = form_elsewhere({end - other_rows(rows, end).size(), end}, device);
  resources_.findings->output_law = find_output_law(form, &other);
  whole_->expect(other.outputs);
}

OutputForm RowChecks::form_elsewhere(Rows rows, at::Device device) {
  if (forwards_.wrote_inputs()) {
    throw Unsupported(
        "forward changes its inputs in place, and has to run on other rows too, to find out how "
        "its outputs follow the samples; write that out of place, as in x = x - mean. The rows "
        "that it ran on are changed");
  }
  OutputForm form;
  forwards_.record_elsewhere(
      rows, [&](const Batch& inputs, const tape::Tape& tape, const Batch& outputs) {
        form = form_of(outputs, rows.size(), tape, inputs, device);
        if (experiment_.awaits(rows)) experiment_.meet_others(rows.size(), inputs, tape, outputs);
      });
  return form;
}

}  // namespace infinitybatch
