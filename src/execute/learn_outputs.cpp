// The part of Executor that finds out how a model's outputs follow its samples.
#include <infinitybatch/execute/executor.hpp>

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/plain_leaves.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/tape/sample_flow.hpp>

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

void Executor::learn_outputs(Rows rows, const Batch& inputs, const Batch& outputs,
                             const tape::Tape& tape) {
  const at::Device device = job_.coupled->device().value_or(job_.device);
  const OutputForm form = form_of(outputs, rows.size(), tape, inputs, device);
  if (!needs_other_rows(form)) {
    *job_.output_law = find_output_law(form, nullptr);
    return;
  }
  const int64_t end = job_.batch_size();
  WholeOutputs& whole = two_pass_ ? two_pass_->outputs() : *whole_outputs_;
  if (only_ambiguous(form)) {
    std::optional<OutputForm> two;
    try {
      if (!wrote_inputs_) two = form_elsewhere({0, 2}, device);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
      // No room for two: samples lie first, as is the convention.
    }
    *job_.output_law = find_output_law(form, two ? &*two : nullptr);
    return;
  }
  if (end % rows.size() != 0) return whole.know_sources(form.from_samples, form.why);
  // Other samples, too.
  const OutputForm other = form_elsewhere({end - other_rows(rows, end).size(), end}, device);
  *job_.output_law = find_output_law(form, &other);
  whole.expect(other.outputs);
}

OutputForm Executor::form_elsewhere(Rows rows, at::Device device) {
  if (wrote_inputs_) {
    throw Unsupported(
        "forward changes its inputs in place, and has to run on other rows too, to find out how "
        "its outputs follow the samples; write that out of place, as in x = x - mean. The rows "
        "that it ran on are changed");
  }
  OutputForm form;
  record_elsewhere(rows, [&](const Batch& inputs, const tape::Tape& tape, const Batch& outputs) {
    form = form_of(outputs, rows.size(), tape, inputs, device);
    if (experiment_.awaits(rows)) experiment_.meet_others(rows.size(), inputs, tape, outputs);
  });
  return form;
}

}  // namespace infinitybatch
