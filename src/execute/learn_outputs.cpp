// The part of Executor that finds out how a model's outputs follow its samples.
#include <infinitybatch/execute/executor.hpp>

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/tape/sample_flow.hpp>

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
