#include "execute/pass.hpp"

#include "autograd/engine.hpp"
#include "core/torch_compat.hpp"
#include "execute/external_loss.hpp"
#include "execute/schedule.hpp"
#include "tape/arguments.hpp"
#include "tape/mismatch.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

const std::vector<tape::ValueId> kNone;

std::set<tape::ValueId> given_to_first_op(const tape::Tape& tape, const tape::Segment& segment) {
  std::set<tape::ValueId> values;
  tape::for_each_argument(tape, tape.ops[segment.ops.begin],
                          [&](tape::ValueId value, const tape::Slot&) { values.insert(value); });
  return values;
}

}  // namespace

Pass::Pass(const Setup& setup, autograd::GradientSinks& sinks, BufferRule& buffers,
           WholeOutputs* whole)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      sinks_(sinks),
      buffers_(buffers),
      whole_(whole),
      held_buffers_(buffers_of(setup.problem)),
      devices_(devices_of(setup.problem)) {
  const bool together = strategy_.is_cut() && !strategy_.per_micro_batch();
  if (problem_.match_native_rng && together) {
    streams_ = std::make_shared<coupled::RandomStreams>(devices_);
    foreign_ = RngSnapshot::capture_foreign();
    foreign_before_ = tell_foreign_sources();
  }
}

int64_t Pass::segments() const {
  if (strategy_.per_micro_batch() && !parts_.empty()) {
    return static_cast<int64_t>(parts_.begin()->second.recorded->segments.size());
  }
  return static_cast<int64_t>(ops_.size()) + 1;
}

int64_t Pass::segments(Rows rows) const {
  return static_cast<int64_t>(parts_.at(rows.begin).recorded->segments.size());
}

Stretches Pass::stretches(Rows rows) const {
  const Recorded& recorded = *parts_.at(rows.begin).recorded;
  Stretches ends(recorded.stretches.begin() + 1, recorded.stretches.end());
  ends.push_back(static_cast<int64_t>(recorded.segments.size()));
  return ends;
}

bool Pass::is_made_again(const Part& part, int64_t segment) const {
  if (!strategy_.checkpoints()) return false;
  if (resources_.checkpoints->forget) return true;
  const bool at_once = !strategy_.per_micro_batch() || resources_.checkpoints->again;
  return at_once && segment == part.recorded->last_beside(segment);
}

bool Pass::reads_inputs(Rows rows, int64_t segment) const {
  const Part& part = parts_.at(rows.begin);
  if (strategy_.per_micro_batch() && part.retained.contains(segment)) return false;
  const bool next_op = !is_last(part, segment) && has_op_before(part, segment + 1);
  int64_t first = segment;
  if (is_made_again(part, segment)) first = part.recorded->first_beside(segment);
  for (int64_t s = first; s <= segment + (next_op ? 1 : 0); ++s) {
    if (segment_of(part, s).reads_inputs) return true;
  }
  return false;
}

std::vector<at::Tensor> Pass::frontier(Part& part, const tape::Segment& segment,
                                       bool op_only) const {
  std::vector<at::Tensor> values(part.recorded->tape.value_count);
  std::set<tape::ValueId> wanted;
  if (op_only) wanted = given_to_first_op(part.recorded->tape, segment);
  for (const tape::Take& take : segment.takes) {
    if (op_only && wanted.count(take.from.value) == 0) continue;
    at::Tensor& value = values[take.from.value];
    if (take.from.giver >= 0) {
      value = part.waiting.at(take.from);
      continue;
    }
    for (const tape::External& external : part.recorded->tape.externals) {
      if (external.value != take.from.value) continue;
      // A tape that is used again finds what the buffer holds in this step.
      const bool now = strategy_.reuses_tapes && external.is_buffer;
      value = now ? external.tensor.detach() : external.before;
    }
  }
  return values;
}

Pass::Work Pass::play(Part& part, Rows rows, const Batch& inputs, int64_t index,
                      std::vector<tape::Draw>& random) {
  const tape::Segment& segment = segment_of(part, index);
  Work work;
  work.values = frontier(part, segment);
  for (const tape::Take& take : segment.takes) {
    at::Tensor& value = work.values[take.from.value];
    const bool differentiable = part.differentiable.count(take.from) != 0;
    if (differentiable) {
      work.leaves.emplace_back(take.from, value.detach().requires_grad_());
      value = value.detach();
    }
    if (take.written) value = value.clone();
    // No leaf itself, as in forward: autocast keeps casts of leaves.
    if (differentiable) compat::begin_history(value, work.leaves.back().second);
  }
  tape::StandIn first;
  if (has_op_before(part, index)) {
    first = [&](std::vector<c10::IValue>& arguments) {
      return op_before(part, index).apply(rows, arguments, work.op_leaves);
    };
  }
  try {
    tape::play(part.recorded->tape, segment, inputs, work.values, random, first, part.reused);
  } catch (const tape::OtherValues&) {
    distrust();
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    if (!part.reused) throw;
    distrust();
    const std::string why = error.what_without_backtrace();
    throw tape::OtherValues(
        "static_graph says that forward depends on shapes only, but what was recorded of it does "
        "not run on rows " +
        std::to_string(rows.begin) + " to " + std::to_string(rows.end) + " (" +
        why.substr(0, why.find('\n')) +
        "): sizes in it follow the samples' values; leave static_graph out");
  }
  return work;
}

/// What forward does depends on values after all, or may: each micro-batch is recorded.
void Pass::distrust() {
  *resources_.static_tapes->varies = true;
  resources_.static_tapes->by_rows.clear();
}

/// Without user code nobody else writes the model's own counters.
void Pass::meet_written(const Part& part, int64_t segment, const Work& work) {
  if (!strategy_.reuses_tapes) return;
  for (const tape::Take& take : segment_of(part, segment).takes) {
    if (!take.written || part.recorded->last_writer.at(take.from.value) != segment) continue;
    for (const tape::External& external : part.recorded->tape.externals) {
      if (external.value != take.from.value || !external.is_buffer) continue;
      buffers_.meet(external.tensor, work.values[external.value].detach());
    }
  }
}

/// \param inside what this stretch needs only: later ones have been there already
void Pass::keep(Part& part, int64_t segment, const Work& work, bool inside) const {
  const int64_t last = part.recorded->last_beside(segment);
  for (const tape::ValueId value : segment_of(part, segment).gives) {
    const tape::Crossing crossing{value, static_cast<int32_t>(segment)};
    if (inside && part.recorded->first_user.at(crossing) > last) continue;
    const at::Tensor& tensor = work.values[value];
    part.waiting[crossing] = tensor.detach();
    if (tensor.requires_grad()) part.differentiable.insert(crossing);
  }
}

/// Takes what waits to the next cut.
Pass::Work Pass::go_through(Part& part, Rows rows, const Batch& inputs, int64_t segment,
                            bool inside) {
  std::vector<tape::Draw> random = part.random[static_cast<size_t>(segment)];
  Work work = play(part, rows, inputs, segment, random);
  keep(part, segment, work, inside);
  if (!is_last(part, segment)) {
    part.random[static_cast<size_t>(segment) + 1] = std::move(random);
  }
  return work;
}

/// Of what this stretch has given that which no segment behind this one needs.
void Pass::let_go(Part& part, int64_t segment) {
  const int64_t first = part.recorded->first_beside(segment);
  part.waiting.erase_if([&](tape::Crossing crossing, bool) {
    return crossing.giver >= first && part.recorded->last_user.at(crossing) <= segment;
  });
}

void Pass::advance_to(Rows rows, const Batch& inputs, int64_t segment) {
  Part& part = parts_.at(rows.begin);
  for (int64_t s = part.recorded->first_beside(segment); s < segment; ++s) {
    go_through(part, rows, inputs, s, /*inside=*/true);
    if (resources_.checkpoints->forget) let_go(part, s);
    free();
    if (strategy_.offloads()) keep_for(part, s + 1, /*back=*/true);
  }
}

Batch Pass::advance(Rows rows, const Batch& inputs, int64_t segment, bool retain) {
  Part& part = parts_.at(rows.begin);
  Work work = go_through(part, rows, inputs, segment, /*inside=*/false);
  meet_written(part, segment, work);
  let_go(part, segment);
  const bool last = is_last(part, segment);
  if (!last && has_op_before(part, segment + 1)) {
    const tape::Segment& next = segment_of(part, segment + 1);
    std::vector<at::Tensor> values = frontier(part, next, /*op_only=*/true);
    op_before(part, segment + 1)
        .collect(rows, tape::first_arguments(part.recorded->tape, next, inputs, values));
  }
  Batch outputs;
  if (last) outputs = tape::result_of(part.recorded->tape, work.values);
  if (retain) part.retained[segment] = std::move(work);
  return outputs;
}

void Pass::combine(int64_t stretch) {
  const Recorded& recorded = *parts_.begin()->second.recorded;
  const int64_t segment = recorded.stretches[static_cast<size_t>(stretch)];
  const tape::ModesGuard modes;
  recorded.tape.modes[recorded.first_op(segment).modes].apply();
  op_before_stretch(stretch).combine(settled_);
  for (const coupled::SettledBuffers::Entry& entry : settled_.entries()) {
    buffers_.settle(entry.buffer, entry.value);
  }
}

void Pass::begin_backward(bool keep) {
  keep_ = keep;
  replayed_ = false;
  for (const auto& op : ops_) op->begin_backward(keep);
  for (auto& [begin, part] : parts_) part.gradients = WaitingRoom();
}

Batch Pass::resume(Rows rows, const Batch& inputs, int64_t segment) {
  Part& part = parts_.at(rows.begin);
  if (problem_.loss.external() != nullptr) input_leaves_ = inputs.tensors();
  const bool last = is_last(part, segment);
  if (!last) {
    if (has_op_before(part, segment + 1)) correct(part, rows, inputs, segment + 1);
    drop(part, segment + 1);
  }
  if (is_made_again(part, segment)) {
    const int64_t first = part.recorded->first_beside(segment);
    part.waiting.erase_if([&](tape::Crossing crossing, bool) { return crossing.giver >= first; });
    advance_to(rows, inputs, segment);
  }
  const auto retained = part.retained.find(segment);
  if (retained != part.retained.end()) {
    work_ = std::move(retained->second);
    part.retained.erase(retained);
  } else {
    std::vector<tape::Draw> random = part.random[static_cast<size_t>(segment)];
    work_ = play(part, rows, inputs, segment, random);
    // With a separable loss this is the last segment's only pass.
    if (last) meet_written(part, segment, work_);
  }
  if (!last) return {};
  Batch outputs = tape::result_of(part.recorded->tape, work_.values);
  work_.values.clear();
  if (strategy_.per_micro_batch()) compare_with_recording(rows, outputs);
  return outputs;
}

std::vector<at::Tensor> Pass::leaves() const {
  std::vector<at::Tensor> leaves = work_.op_leaves;
  for (const auto& [crossing, leaf] : work_.leaves) leaves.push_back(leaf);
  leaves.insert(leaves.end(), input_leaves_.begin(), input_leaves_.end());
  return leaves;
}

at::Tensor Pass::gradient(Rows rows, size_t leaf, const at::Tensor& output) {
  if (!seeds_.empty()) return seeds_[leaf];
  if (ExternalLoss* loss = problem_.loss.external()) return loss->gradient(rows, leaf, output);
  return whole_->gradient(rows, leaf, output.device());
}

void Pass::backward(Rows rows, int64_t segment, Batch outputs) {
  Part& part = parts_.at(rows.begin);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  const auto add = [&](const at::Tensor& root, at::Tensor gradient) {
    roots.push_back(root);
    gradients.push_back(std::move(gradient));
  };
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& output = outputs.leaves()[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor gradient = this->gradient(rows, i, output);
    if (gradient.defined()) add(output, std::move(gradient));  // else the loss ignores it
  }
  const bool cut = segment != kWhole;
  for (const tape::ValueId value : cut ? segment_of(part, segment).gives : kNone) {
    const tape::Crossing crossing{value, static_cast<int32_t>(segment)};
    if (!part.gradients.contains(crossing)) continue;
    add(work_.values[value], std::move(part.gradients.at(crossing)));
    part.gradients.erase(crossing);
  }
  // The graph keeps what it needs of them.
  outputs = Batch();
  work_.values.clear();
  if (!roots.empty()) {
    sinks_.redirect_other_leaves(roots, leaves());
    autograd::run_backward_of_part(roots, gradients);
  }
  if (cut) collect(rows, segment);
}

void Pass::compare(Rows rows, const Batch& outputs) {
  if (ExternalLoss* loss = problem_.loss.external()) return loss->compare(rows, outputs);
  if (whole_ != nullptr) whole_->compare(rows, outputs);
}

void Pass::check() const {
  confirm_replays();
  if (whole_ == nullptr || !whole_->differ()) return;
  if (strategy_.is_cut()) {
    throw Unsupported(
        std::string(strategy_.per_micro_batch()
                        ? "forward"
                        : "the part of forward after the last op of the whole batch") +
        " gave other outputs when it was replayed, so its gradient would not belong "
        "to the loss; a kernel in it is not deterministic");
  }
  if (replayed_) {
    throw tape::Mismatch("a replayed forward gave other outputs than its recording");
  }
  throw Unsupported(
      "forward gave other outputs when it ran again on the same rows under the same random state, "
      "so its gradient would not belong to the loss. It depends on a kernel that is not "
      "deterministic, on code that torch.compile compiled again in between (torch.compile(model, "
      "dynamic=True)), or on state other than parameters, buffers and torch's, NumPy's or Python's "
      "random numbers");
}

void Pass::collect(Rows rows, int64_t segment) {
  Part& part = parts_.at(rows.begin);
  if (has_op_before(part, segment)) {
    op_before(part, segment).collect_gradient(rows, work_.op_leaves);
  }
  const at::NoGradGuard no_grad;
  for (auto& [crossing, leaf] : work_.leaves) {
    if (!leaf.grad().defined()) continue;
    at::Tensor gradient = std::move(leaf.mutable_grad());
    at::Tensor& sum = part.gradients[crossing];
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      // Gradients of views may lie in memory that they share with another leaf's.
      const bool alone = gradient.has_storage() && gradient.storage().use_count() == 1;
      sum = alone ? std::move(gradient) : gradient.clone();
    }
  }
  if (segment > 0) return;
  drop(part, 0);
  if (!strategy_.per_micro_batch()) return;
  parts_.erase(rows.begin);  // nothing of it is used again
}

void Pass::free() {
  work_ = Work();
  input_leaves_.clear();
  seeds_.clear();
}

void Pass::combine_gradients(int64_t stretch) {
  op_before_stretch(stretch).combine_gradients(sinks_);
}

void Pass::correct(Part& part, Rows rows, const Batch& inputs, int64_t segment) {
  const coupled::WholeBatchOp& op = op_before(part, segment);
  if (op.corrected() == 0) return;
  const tape::Segment& here = segment_of(part, segment);
  std::vector<tape::ValueId> given;
  tape::for_each_argument(part.recorded->tape, part.recorded->first_op(segment),
                          [&](tape::ValueId value, const tape::Slot&) { given.push_back(value); });
  for (size_t i = 0; i < op.corrected(); ++i) {
    const auto take =
        std::find_if(here.takes.begin(), here.takes.end(),
                     [&](const tape::Take& each) { return each.from.value == given[i]; });
    if (take == here.takes.end()) {
      correct_leaf(part, rows, inputs, segment, i, given[i]);
    } else if (part.differentiable.count(take->from) != 0) {
      op.correct(rows, i, part.waiting.at(take->from), part.gradients[take->from]);
    }
  }
  // An op may leave a gradient alone.
  part.gradients.erase_if([](tape::Crossing, bool defined) { return !defined; });
}

/// Of the inputs, or a parameter.
void Pass::correct_leaf(Part& part, Rows rows, const Batch& inputs, int64_t segment, size_t which,
                        tape::ValueId value) {
  std::vector<at::Tensor> values = frontier(part, segment_of(part, segment), /*op_only=*/true);
  tape::first_arguments(part.recorded->tape, segment_of(part, segment), inputs, values);
  const at::Tensor leaf = values[value];
  if (!leaf.requires_grad()) return;
  at::Tensor gradient;
  op_before(part, segment).correct(rows, which, leaf, gradient);
  if (!gradient.defined()) return;
  sinks_.redirect_other_leaves({leaf});
  autograd::run_backward({leaf}, {gradient});
}

void Pass::drop(Part& part, int64_t segment) {
  if (keep_) return;
  part.waiting.erase_if([&](tape::Crossing crossing, bool) {
    return part.recorded->first_user.at(crossing) == segment;
  });
}

}  // namespace infinitybatch
