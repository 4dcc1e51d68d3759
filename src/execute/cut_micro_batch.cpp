#include "execute/cut_micro_batch.hpp"

#include "autograd/engine.hpp"
#include "core/torch_compat.hpp"
#include "execute/buffer_rule.hpp"
#include "execute/static_tapes.hpp"
#include "tape/arguments.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <string>

namespace infinitybatch {
namespace {

std::set<tape::ValueId> given_to_first_op(const tape::Tape& tape, const tape::Segment& segment) {
  std::set<tape::ValueId> values;
  tape::for_each_argument(tape, tape.ops[segment.ops.begin],
                          [&](tape::ValueId value, const tape::Slot&) { values.insert(value); });
  return values;
}

}  // namespace

CutMicroBatch::CutMicroBatch(Rows rows, std::shared_ptr<const Recorded> recorded, StandIns* ops,
                             StaticTapes* lent_by)
    : rows_(rows),
      recorded_(std::move(recorded)),
      ops_(ops),
      lent_by_(lent_by),
      random_(recorded_->segments.size()),
      to_go_back_(segments()) {
  if (ops_ != nullptr && ops_->draw()) return;
  random_[0] = recorded_->tape.initial;
  if (lent_by_ == nullptr) return;
  for (tape::Draw& draw : random_[0]) draw.state = tape::fork(draw.generator);
}

void CutMicroBatch::stand_at(Saved saved) {
  boundaries_ = std::move(saved.boundaries);
  for (int64_t s = 1; s < segments(); ++s) standing_.insert(s);
  for (size_t s = 0; s < saved.random.size(); ++s) random_[s + 1] = std::move(saved.random[s]);
  if (saved.tail) keep_graph(segments() - 1, std::move(*saved.tail));
}

coupled::WholeBatchOp* CutMicroBatch::op_before(int64_t segment) const {
  if (ops_ == nullptr || segment == 0 || !recorded_->begins_stretch(segment)) return nullptr;
  return &ops_->before(recorded_->stretch_of(segment));
}

bool CutMicroBatch::reads_inputs(int64_t first, int64_t last) const {
  const int64_t end = op_behind(last) != nullptr ? last + 1 : last;
  for (int64_t s = first; s <= end; ++s) {
    if (at(s).reads_inputs) return true;
  }
  return false;
}

std::vector<at::Tensor> CutMicroBatch::frontier(const tape::Segment& segment, bool op_only) {
  std::vector<at::Tensor> values(recorded_->tape.value_count);
  std::set<tape::ValueId> wanted;
  if (op_only) wanted = given_to_first_op(recorded_->tape, segment);
  for (const tape::Take& take : segment.takes) {
    if (op_only && wanted.count(take.from.value) == 0) continue;
    at::Tensor& value = values[take.from.value];
    if (take.from.giver >= 0) {
      value = boundaries_.at(take.from);
      continue;
    }
    for (const tape::External& external : recorded_->tape.externals) {
      if (external.value != take.from.value) continue;
      const bool now = recorded_->outlives_step && external.is_buffer;
      value = now ? external.tensor.detach() : external.before;
    }
  }
  return values;
}

PlayedSegment CutMicroBatch::play(const Batch& inputs, int64_t segment,
                                  std::vector<tape::Draw>& random) {
  PlayedSegment played;
  played.values = frontier(at(segment));
  for (const tape::Take& take : at(segment).takes) {
    at::Tensor& value = played.values[take.from.value];
    const bool differentiable = boundaries_.differentiable(take.from);
    if (differentiable) {
      played.leaves.emplace_back(take.from, value.detach().requires_grad_());
      value = value.detach();
    }
    if (take.written) value = value.clone();
    // No leaf itself, as in forward: autocast keeps casts of leaves.
    if (differentiable) compat::begin_history(value, played.leaves.back().second);
  }
  if (lent_by_ == nullptr) {
    play_values(inputs, segment, played, random);
    return played;
  }
  try {
    play_values(inputs, segment, played, random);
  } catch (const tape::OtherValues&) {
    lent_by_->distrust();
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    lent_by_->distrust();
    const std::string why = error.what_without_backtrace();
    throw tape::OtherValues(
        "static_graph says that forward depends on shapes only, but what was recorded of it does "
        "not run on rows " +
        std::to_string(rows_.begin) + " to " + std::to_string(rows_.end) + " (" +
        why.substr(0, why.find('\n')) +
        "): sizes in it follow the samples' values; leave static_graph out");
  }
  return played;
}

void CutMicroBatch::play_values(const Batch& inputs, int64_t segment, PlayedSegment& played,
                                std::vector<tape::Draw>& random) const {
  tape::StandIn first;
  if (coupled::WholeBatchOp* op = op_before(segment)) {
    first = [this, op, &played](std::vector<c10::IValue>& arguments) {
      return op->apply(rows_, arguments, played.op_leaves);
    };
  }
  tape::play(recorded_->tape, at(segment), inputs, played.values, random, first,
             /*other_rows=*/lent_by_ != nullptr);
}

PlayedSegment CutMicroBatch::go_through(const Batch& inputs, int64_t segment) {
  std::vector<tape::Draw> random = random_[static_cast<size_t>(segment)];
  PlayedSegment played = play(inputs, segment, random);
  if (is_last(segment)) return played;
  standing_.insert(segment + 1);
  for (const tape::ValueId value : at(segment).gives) {
    const tape::Crossing crossing{value, static_cast<int32_t>(segment)};
    if (is_needed(crossing)) boundaries_.save(crossing, played.values[value]);
  }
  random_[static_cast<size_t>(segment) + 1] = std::move(random);
  return played;
}

bool CutMicroBatch::is_needed(tape::Crossing crossing) const {
  const auto behind = standing_.upper_bound(crossing.giver);
  return behind != standing_.end() && *behind <= recorded_->last_user(crossing, to_go_back_);
}

void CutMicroBatch::forget_unneeded() {
  boundaries_.forget_if([this](tape::Crossing crossing) { return !is_needed(crossing); });
}

void CutMicroBatch::leave(int64_t segment) {
  if (standing_.erase(segment) > 0) forget_unneeded();
}

void CutMicroBatch::advance_to(const Batch& inputs, int64_t segment, bool forget,
                               offload::Store* store) {
  const int64_t first = recorded_->first_beside(segment);
  for (int64_t s = first; s < segment; ++s) {
    go_through(inputs, s);
    if (forget && s > first) leave(s);
    if (store != nullptr) offload_but_for(*store, s + 1, /*back=*/true);
  }
}

void CutMicroBatch::give_op_behind(const Batch& inputs, int64_t segment) {
  coupled::WholeBatchOp* const op = op_behind(segment);
  if (op == nullptr) return;
  const tape::Segment& next = at(segment + 1);
  std::vector<at::Tensor> values = frontier(next, /*op_only=*/true);
  for (const tape::Take& take : next.takes) {
    at::Tensor& value = values[take.from.value];
    if (!value.defined() || !boundaries_.differentiable(take.from)) continue;
    value = value.detach().requires_grad_();
  }
  op->collect(rows_, tape::first_arguments(recorded_->tape, next, inputs, values));
}

void CutMicroBatch::tell_written(int64_t segment, const PlayedSegment& played,
                                 BufferRule& buffers) const {
  if (!recorded_->outlives_step) return;
  for (const tape::Take& take : at(segment).takes) {
    if (!take.written || recorded_->last_writer.at(take.from.value) != segment) continue;
    for (const tape::External& external : recorded_->tape.externals) {
      if (external.value != take.from.value || !external.is_buffer) continue;
      buffers.meet(external.tensor, played.values[external.value].detach());
    }
  }
}

PlayedSegment CutMicroBatch::graph_of(const Batch& inputs, int64_t segment) {
  if (auto kept = graphs_.extract(segment)) return std::move(kept.mapped());
  std::vector<tape::Draw> random = random_[static_cast<size_t>(segment)];
  return play(inputs, segment, random);
}

void CutMicroBatch::begin_backward(bool keep) {
  boundaries_.forget_gradients();
  if (lasting_) {  // one that failed half way stands at more
    standing_ = *std::exchange(lasting_, std::nullopt);
    forget_unneeded();
  }
  if (keep) lasting_ = standing_;
}

void CutMicroBatch::begin_again() {
  standing_.clear();
  lasting_.reset();
  to_go_back_ = segments();
  boundaries_.forget_gradients();
  forget_unneeded();
}

void CutMicroBatch::correct_behind(const Batch& inputs, int64_t segment,
                                   const PlayedSegment& played, autograd::GradientSinks& sinks) {
  const coupled::WholeBatchOp* const op = op_behind(segment);
  if (op == nullptr || op->corrected() == 0) return;
  const tape::Segment& next = at(segment + 1);
  std::vector<tape::ValueId> given;
  tape::for_each_argument(recorded_->tape, recorded_->first_op(segment + 1),
                          [&](tape::ValueId value, const tape::Slot&) { given.push_back(value); });
  for (size_t i = 0; i < op->corrected(); ++i) {
    const auto take =
        std::find_if(next.takes.begin(), next.takes.end(),
                     [&](const tape::Take& each) { return each.from.value == given[i]; });
    if (take == next.takes.end()) {
      correct_leaf(inputs, segment + 1, i, given[i], sinks);
    } else if (boundaries_.differentiable(take->from)) {
      // What this segment gave may be saved no more.
      const at::Tensor input = take->from.giver == segment
                                   ? played.values[take->from.value].detach()
                                   : boundaries_.at(take->from);
      op->correct(rows_, i, input, boundaries_.gradient(take->from));
    }
  }
  // An op may leave a gradient alone.
  boundaries_.forget_undefined_gradients();
}

/// Of the inputs, or a parameter.
void CutMicroBatch::correct_leaf(const Batch& inputs, int64_t segment, size_t which,
                                 tape::ValueId value, autograd::GradientSinks& sinks) {
  std::vector<at::Tensor> values(recorded_->tape.value_count);
  tape::first_arguments(recorded_->tape, at(segment), inputs, values);
  const at::Tensor leaf = values[value];
  if (!leaf.requires_grad()) return;
  at::Tensor gradient;
  op_before(segment)->correct(rows_, which, leaf, gradient);
  if (!gradient.defined()) return;
  sinks.redirect_other_leaves({leaf});
  autograd::run_backward({leaf}, {gradient});
}

void CutMicroBatch::take_gradients(int64_t segment, const PlayedSegment& played,
                                   std::vector<at::Tensor>& roots,
                                   std::vector<at::Tensor>& gradients) {
  for (const tape::ValueId value : at(segment).gives) {
    at::Tensor gradient = boundaries_.take_gradient({value, static_cast<int32_t>(segment)});
    if (!gradient.defined()) continue;
    roots.push_back(played.values[value]);
    gradients.push_back(std::move(gradient));
  }
}

void CutMicroBatch::collect(int64_t segment, PlayedSegment& played) {
  if (coupled::WholeBatchOp* op = op_before(segment)) op->collect_gradient(rows_, played.op_leaves);
  const at::NoGradGuard no_grad;
  for (auto& [crossing, leaf] : played.leaves) {
    if (leaf.grad().defined()) {
      boundaries_.add_gradient(crossing, std::move(leaf.mutable_grad()));
    }
  }
  if (!lasting_) to_go_back_ = segment;
  if (!lasting_ || !lasting_->contains(segment)) standing_.erase(segment);
  forget_unneeded();
}

BoundaryActivations::Some CutMicroBatch::taken(int64_t segment, bool back) const {
  BoundaryActivations::Some some;
  const auto take = [&](tape::Crossing crossing, bool at_hand = false) {
    if (!at_hand) some.values.insert(crossing);
    // Gradients of what several segments use are summed up.
    if (back) some.gradients.insert(crossing);
  };
  for (const tape::Take& each : at(segment).takes) take(each.from);
  if (back) {
    for (const tape::ValueId value : at(segment).gives) {
      some.gradients.insert({value, static_cast<int32_t>(segment)});
    }
  }
  const coupled::WholeBatchOp* const op = op_behind(segment);
  if (op == nullptr) return some;
  // It is given this before it is combined, and some of it to correct it.
  size_t left = back ? op->corrected() : SIZE_MAX;
  tape::for_each_argument(recorded_->tape, recorded_->first_op(segment + 1),
                          [&](tape::ValueId value, const tape::Slot&) {
                            if (left == 0) return;
                            --left;
                            for (const tape::Take& each : at(segment + 1).takes) {
                              if (each.from.value != value) continue;
                              take(each.from, /*at_hand=*/back && each.from.giver == segment);
                            }
                          });
  return some;
}

}  // namespace infinitybatch
