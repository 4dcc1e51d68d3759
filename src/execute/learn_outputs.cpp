// The part of RowChecks that finds out how a model's outputs follow its samples.
#include "core/following_dims.hpp"
#include "core/out_of_memory.hpp"
#include "core/pinned_copies.hpp"
#include "core/plain_leaves.hpp"
#include "coupled/fixed_ops.hpp"
#include "coupled/row_errors.hpp"
#include "execute/findings.hpp"
#include "execute/row_checks.hpp"
#include "tape/sample_flow.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

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
  OutputForm form = form_of(outputs, rows.size(), tape, inputs, device);
  if (may_be_flattened(form)) form.flattened = try_flattened(rows);
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
  if (end % rows.size() != 0) {
    return whole_->know_sources(form.from_samples, form.why, form.flattened);
  }
  // Other samples, too.
  const OutputForm other = form_elsewhere({end - other_rows(rows, end).size(), end}, device);
  resources_.findings->output_law = find_output_law(form, &other);
  whole_->expect(other.outputs);
}

std::vector<Flattened> RowChecks::try_flattened(Rows rows) {
  constexpr int64_t kMost = 8;
  const int64_t more = std::min(std::clamp<int64_t>(rows.size(), 2, kMost), problem_.batch_size());
  const int64_t fewer = more / 2;
  const Rows part{more - fewer, more};
  std::vector<Flattened> found;
  if (forwards_.watch().collective()) return found;  // other ranks would not answer
  const auto compare = [&] {
    const Batch inputs = forwards_.rows_again({0, more});
    const auto whole = try_forward(inputs, more);
    const auto few = try_forward(infinitybatch::rows(inputs, part.begin, part.end), fewer);
    if (!whole || !few) return;
    const bool told = !whole->strayed && !few->strayed && whole->foreign == few->foreign;
    const auto& there = whole->outputs.leaves();
    const auto& here = few->outputs.leaves();
    found.assign(there.size(), Flattened::no);
    for (size_t i = 0; i < there.size() && i < here.size(); ++i) {
      if (!there[i].tensor.defined() || !here[i].tensor.defined()) continue;
      const std::vector<Batch> both{whole->outputs, few->outputs};
      if (!following_dims(both, {more, fewer}, i).empty()) continue;
      found[i] = flattened(there[i].tensor, more, here[i].tensor, part);
      if (found[i] != Flattened::no && !told) found[i] = Flattened::unknown;
    }
  };
  // A head that begins at zero gives all samples the same: it is moved meanwhile, if it can be.
  MovedValues moved(problem_.parameters, forwards_.buffers().written_buffers(),
                    forwards_.watch().memory());
  for (const bool at_others : {true, false}) {
    try {
      at_others ? moved.on() : moved.off();
      compare();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      moved.off();
      if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    }
    const bool unknown = std::find(found.begin(), found.end(), Flattened::unknown) != found.end();
    if (!found.empty() && !unknown) break;
  }
  moved.off();
  return found;
}

void RowChecks::check_flattened_targets() {
  const int64_t rows = forwards_.smallest();
  if (problem_.loss.separable() == nullptr || problem_.rehearses ||
      resources_.findings->targets_checked)
    return;
  if (rows == 0 || rows >= problem_.batch_size() || !keeps_rows(*problem_.targets)) return;
  if (coupled::FixedOps::at_work()) return;  // this step is part of a forward that is looked at
  const Batch targets = problem_.targets->rows(0, 1);
  const bool interleaved =
      std::any_of(targets.leaves().begin(), targets.leaves().end(),
                  [](const Leaf& leaf) { return leaf.places > 1 && leaf.interleaved; });
  if (interleaved) {
    const std::vector<Flattened> found = try_flattened({0, rows});
    const auto refuse = [](const std::string& what) {
      throw BatchError("targets are [time, batch] flattened, row time * samples + n, and " + what +
                       ": give targets of shape [time, batch], or [batch, time] marked "
                       "ib.batch_dim(targets, 0), and flatten outputs and targets in the loss");
    };
    if (found.empty()) refuse("forward runs on no other rows that would tell the order of outputs");
    for (size_t i = 0; i < found.size(); ++i) {
      if (i < read_.size() && !read_[i]) continue;
      if (found[i] == Flattened::together) {
        refuse(
            "outputs are [batch, time] flattened, row n * time + t, so that each would meet "
            "another's target");
      }
      if (found[i] == Flattened::unknown) refuse("values of outputs do not tell their order");
    }
  }
  resources_.findings->targets_checked = true;
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
