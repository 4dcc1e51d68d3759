#include "step/wrap_forward.hpp"

#include "autograd/engine.hpp"
#include "core/unwatched.hpp"
#include "execute/schedule.hpp"
#include "step/kept_boundaries.hpp"
#include "step/meter.hpp"
#include "step/sorted_batch.hpp"
#include "step/wrap_run.hpp"
#include "tape/sample_flow.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace infinitybatch {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

std::vector<at::Tensor> with_graph(const Batch& outputs) {
  std::vector<at::Tensor> tensors;
  for (const Leaf& leaf : outputs.leaves()) {
    if (leaf.tensor.defined() && leaf.tensor.requires_grad()) tensors.push_back(leaf.tensor);
  }
  return tensors;
}

}  // namespace

Rerunnable::Rerunnable(const Batch& inputs) {
  for (const at::Tensor& tensor : inputs.tensors()) {
    versions_.push_back(Version::of("an input", tensor));
  }
}

bool Rerunnable::holds() const {
  return std::all_of(versions_.begin(), versions_.end(),
                     [](const Version& version) { return version.holds(); });
}

void Rerunnable::check() const {
  if (holds()) return;
  throw Unsupported(
      "forward changes its inputs in place, and has to run on them again (to be measured, after "
      "memory ran out, or for a layer that sees the whole batch); write that out of place, as in "
      "x = x - mean. The rows that it ran on are changed");
}

ForwardPass::ForwardPass(std::shared_ptr<Wrapped> wrapped, const Setup& setup, const Batch& inputs,
                         BatchKind kind)
    : options_(wrapped->options),
      own_(wrapped->own),
      exact_(options_.batch_coupling == BatchCoupling::exact),
      recording_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()),
      call_(std::make_shared<WrappedCall>()),
      setup_(setup) {
  call_->wrapped = std::move(wrapped);
  call_->nodes = NodeRange::from_here();
  call_->device = setup.problem.device;
  call_->trimming = setup.problem.trimming;
  call_->devices = devices_of(setup.problem);
  call_->buffers = setup.problem.buffers;
  call_->modes = tape::Modes::current();
  if (setup.strategy.offloads_graphs())
    call_->store = call_->wrapped->store_on(setup.problem.device);
  read(inputs);
  for (const NamedParameter& parameter : setup.problem.parameters) read(parameter);
  parameters_ = call_->leaves.size();
  const int64_t total = batch_size(inputs, "inputs");
  if (exact_ && own_.left_places) {
    left_.emplace(own_.left_places, total, room_for_left(*call_->wrapped, setup.problem.device),
                  !options_.static_graph);
  }
  before_ = RngSnapshot::capture(call_->devices);
  call_->kind = std::move(kind);
  call_->findings = call_->wrapped->findings_of(call_->kind);
  if (recording_) values_ = std::make_shared<BufferValues>(setup.problem.buffers);
  const auto forward = [this](const Batch& micro) {
    if (call_->run->engine().forwards().learning()) return call_->wrapped->model.forward(micro);
    const uint64_t first_node = at::sequence_number::peek();
    Batch outputs = run_model(micro);
    if (cut()) learn_from_recording(without_left(outputs), micro, first_node);
    return outputs;
  };
  const auto taken = [this](Rows /*rows*/, const Batch& micro, Batch outputs) {
    return meet(micro, std::move(outputs));
  };
  call_->run = std::make_unique<WrapRun>(*call_, setup, values_, recording_, forward, taken);
  const StaticForward& known = call_->run->known();
  wants_gradient_ = known.wants_gradient;
  ambiguous_ = known.ambiguous;
  if (left_ && cut()) left_->adopt(known.left);
  for (const NamedParameter& leaf : known.leaves) {
    if (!known_leaves_.insert(leaf.tensor.unsafeGetTensorImpl()).second) continue;
    call_->leaves.push_back(leaf);
    call_->run->engine().sinks().adopt(leaf.tensor);
  }
}

void ForwardPass::read(const Batch& inputs) {
  inputs_ = inputs;
  std::vector<Leaf> leaves = inputs.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    at::Tensor& tensor = leaves[i].tensor;
    if (!tensor.defined()) continue;
    if (recording_ && tensor.requires_grad()) call_->wanted_inputs.push_back(i);
    tensor = tensor.detach();
    const at::Device device = tensor.device();
    auto& devices = call_->devices;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  call_->inputs = Batch(std::move(leaves), inputs.structure());
}

void ForwardPass::read(const NamedParameter& parameter) {
  if (!recording_) return;
  const at::Tensor& tensor = parameter.tensor;
  if (!known_leaves_.insert(tensor.unsafeGetTensorImpl()).second) return;
  call_->requires_grad.emplace_back(tensor, tensor.requires_grad());
  if (tensor.requires_grad()) call_->leaves.push_back(parameter);
}

Batch ForwardPass::run(Split split) {
  WrapRun& run = *call_->run;
  std::vector<int64_t>& sizes = split.sizes;
  const auto count = static_cast<int64_t>(sizes.size());
  int64_t retained = recording_ && !cut() ? std::min(split.retained, count) : 0;
  // Recordings tell how many segments there are; of a model that is not cut the first one tells
  // whether another size is wanted.
  int64_t row = 0;
  for (size_t i = 0; i < (cut() ? sizes.size() : 1); ++i) {
    const bool keep = static_cast<int64_t>(i) >= count - retained && retained > 0;
    this->run({row, row + sizes[i]}, keep);
    row += sizes[i];
    const bool one_size =
        sizes.size() > 1 && std::ranges::count(sizes, sizes.front()) == std::ssize(sizes);
    if (i > 0 || !one_size || !wants_another_size()) continue;
    // Two halves: layers may refuse a single sample. As many rows keep their graph as planned.
    const int64_t half = sizes[1] / 2;
    sizes[1] -= half;
    sizes.insert(sizes.begin() + 2, half);
    if (retained > 0 && retained >= count - 1) ++retained;
  }
  const int64_t segments = run.engine().segments();
  if (cut() && split.segments && segments != *split.segments) throw SegmentsChanged(segments);
  const size_t done = cut() ? sizes.size() : 1;
  KeptBoundaries kept = setup_.strategy.kept;
  if (cut() && call_->budget) learn_boundaries({0, sizes.front()}, kept);
  Plan plan =
      cut() ? cut_plan(sizes, segments, /*retained=*/0, /*coupled=*/true, /*penalty=*/false, kept)
            : two_pass_plan(sizes, retained, setup_.strategy.offloads_graphs());
  const bool offloads = setup_.strategy.offloads() && (cut() || setup_.strategy.offloads_graphs());
  if (offloads) plan = with_offload(std::move(plan), split.overlaps);
  run.begin(std::move(plan));
  for (size_t i = done; i < run.loss_at(); ++i) {
    const Instruction& instruction = run.plan().instructions[i];
    const bool retains = instruction.operation == Operation::retain;
    if (retains || instruction.operation == Operation::record) {
      this->run(run.rows_of(instruction), retains);
    } else {
      const tape::OpBus::Scope listening(own_losses_, {.results = true});
      run.run(i, i + 1);
    }
  }
  run.tell_copies();
  if (cut()) take_outputs_of_cuts();
  return finish();
}

void ForwardPass::learn_boundaries(Rows first, KeptBoundaries& kept) {
  Wrapped& wrapped = *call_->wrapped;
  const std::lock_guard<std::mutex> lock(wrapped.mutex);
  KnownMemory& memory = wrapped.known.memory_of(call_->kind);
  auto& boundaries = memory.boundaries;
  if (!boundaries) {
    boundaries.emplace(call_->run->engine().recorded(first), first.size(), /*coupled=*/true);
  }
  const bool given = options_.micro_batch_size && options_.offload.when == Offload::When::never;
  if (!given || !recording_) return;
  const int64_t samples = batch_size(inputs_, "inputs");
  const int64_t room = *call_->budget - memory::live(call_->device);
  const int64_t most = room - room / 16;  // what the loss takes nobody knows
  if (boundaries->with(kept, samples).bytes <= most) return;
  const Planner& planner = wrapped.planners[call_->planner];
  if (keep_fewer(kept, {*boundaries, planner, samples, *call_->budget, most})) memory.kept = kept;
}

void ForwardPass::take_outputs_of_cuts() {
  int64_t row = 0;
  for (Batch& part : call_->run->take_outputs()) {
    const Rows rows{row, row + row_counts_[outputs_.size()]};
    outputs_.push_back(without_left(std::move(part), /*keep=*/true));
    losses_.push_back(own_losses_.of(outputs_.back()));
    show(rows, outputs_.back());
    row = rows.end;
  }
}

void ForwardPass::run(Rows rows, bool keep) {
  part_ = rows.size() < batch_size(inputs_, "inputs");
  rows_at_work_ = rows;
  keeping_ = keep;
  may_keep_ = true;
  first_node_ = at::sequence_number::peek();
  WrapRun& run = *call_->run;
  run.record(rows, keep);
  row_counts_.push_back(rows.size());
  const bool first = row_counts_.size() == 1;
  if (cut()) {
    if (first || may_stand_once()) note_sources(run.engine().tape(rows));
    return;
  }
  if (keep && !may_keep_) run.engine().drop_graphs();
  if (first)
    ambiguous_ = is_ambiguous(run.taken(rows), rows.size(), from_samples_,
                              call_->findings.rows_seen.dims, own_);
}

Batch ForwardPass::run_model(const Batch& micro) {
  const auto forward = [&] {
    own_losses_.watch(micro);
    const tape::OpBus::Scope listening(own_losses_, {.results = true});
    return call_->wrapped->model.forward(micro);
  };
  if (!left_) return forward();
  Batch outputs = left_->with_left(batch_size(micro, "inputs"), forward);
  if (left_->count() > 0) call_->wrapped->joining = true;
  return outputs;
}

Batch ForwardPass::without_left(Batch outputs, bool keep) {
  if (!left_) return outputs;
  return left_->without_left(std::move(outputs), keep,
                             /*copies=*/setup_.strategy.offloads_graphs());
}

Batch ForwardPass::meet(const Batch& inputs, Batch outputs) {
  const bool first = row_counts_.empty();
  const bool records = recording_ && call_->wrapped->use_tapes;
  if (records ? first || may_stand_once() : first && part_) {
    note_sources(call_->run->engine().tape(rows_at_work_));
  }
  Batch given = without_left(std::move(outputs), /*keep=*/true);
  losses_.push_back(own_losses_.of(given));
  own_losses_.forget();
  if (!recording_) return given;
  const std::vector<at::Tensor> left = call_->run->engine().forwards().state().take_left();
  note_graph(given, inputs, first_node_);
  if (keeping_) {
    const bool alone = left.empty() || may_keep_beside(left);
    may_keep_ = may_keep_ && alone;
    const Wrapped& wrapped = *call_->wrapped;
    // Other ranks would not answer a replay.
    const bool first_backward = !wrapped.went_back && !said_.any();
    if (!part_ && may_keep_ && (wrapped.left_read || first_backward)) {
      // Through a hook or a closure, which nobody knows: the first backward tells.
      call_->run->engine().sinks().release(with_graph(given));
      may_keep_ = false;
    }
  } else if (part_) {
    // Nobody but whoever kept a tensor of it goes back through this graph.
    std::vector<at::Tensor> roots = with_graph(given);
    roots.insert(roots.end(), left.begin(), left.end());
    end_graphs(roots);
  }
  return given;
}

void ForwardPass::learn_from_recording(const Batch& outputs, const Batch& micro,
                                       uint64_t first_node) {
  ambiguous_ = ambiguous_ || is_ambiguous(outputs, batch_size(micro, "inputs"), {},
                                          call_->findings.rows_seen.dims, own_);
  if (recording_) note_graph(outputs, micro, first_node);
}

void ForwardPass::note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node) {
  wants_gradient_.resize(std::max(wants_gradient_.size(), outputs.leaves().size()), false);
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    if (tensor.defined() && tensor.requires_grad()) wants_gradient_[i] = true;
  }
  const std::vector<at::Tensor> roots = with_graph(outputs);
  std::unordered_set<c10::TensorImpl*> of_inputs;
  for (const at::Tensor& tensor : micro.tensors()) of_inputs.insert(tensor.unsafeGetTensorImpl());
  autograd::GradientSinks& sinks = call_->run->engine().sinks();
  const auto note_leaf = [&](const at::Tensor& leaf) {
    c10::TensorImpl* identity = leaf.unsafeGetTensorImpl();
    if (of_inputs.contains(identity) || !known_leaves_.insert(identity).second) return;
    call_->leaves.push_back({"a tensor that forward reads", leaf});
    sinks.adopt(leaf, /*installed=*/cut());
    may_keep_ = false;  // in this graph it has its own accumulator
  };
  for (const at::Tensor& root : roots) {
    if (root.is_leaf()) note_leaf(root);
  }
  // Each thread counts its nodes for itself. What autograd.grad makes inside forward, to go back
  // through it, a device's thread has made.
  const uint64_t here = at::RecordFunction::currentThreadId();
  autograd::walk_graph(roots, [&](Node& node) {
    if (const auto* accumulator = dynamic_cast<AccumulateGrad*>(&node)) {
      note_leaf(accumulator->variable);
    } else if (node.thread_id() == here && node.sequence_nr() < first_node) {
      throw Unsupported(
          "forward reads a tensor that was computed before with a graph (" + node.name() +
          "), or that one micro-batch leaves for the next, so its gradient cannot be split; pass "
          "it "
          "as an input (shared, if every sample needs it), or compute it inside forward");
    }
  });
}

bool ForwardPass::may_keep_beside(const std::vector<at::Tensor>& left) {
  Wrapped& wrapped = *call_->wrapped;
  const bool keep = part_ || (wrapped.left_unread && !wrapped.left_read);
  if (!call_->going_back) call_->going_back = std::make_shared<std::atomic<bool>>(false);
  for (const at::Tensor& tensor : left) {
    tensor.register_hook([here = std::weak_ptr(call_->wrapped), going_back = call_->going_back,
                          keep, part = part_](const at::Tensor&) {
      if (*going_back) return;
      if (const auto wrapped = here.lock(); wrapped && !part) wrapped->left_read = true;
      if (keep) refuse_left_in_engine(/*whole_batch=*/!part);
    });
  }
  if (!keep) call_->run->engine().sinks().release(left);
  return keep;
}

void ForwardPass::show(Rows rows, const Batch& outputs) const {
  if (!options_.on_micro_batch) return;
  showing_samples(call_->trimming,
                  options_.on_micro_batch)({rows.begin, rows.end, outputs, Batch()});
  at::autocast::clear_cache();  // what it has cast leads into a graph of its own
}

bool ForwardPass::wants_another_size() const {
  if (row_counts_.empty() || row_counts_.front() < 2) return false;
  if (cut())
    return ambiguous_ || may_stand_once() || call_->run->engine().checks().wants_other_rows();
  const int64_t first = row_counts_.front();
  const bool one_size = std::all_of(row_counts_.begin(), row_counts_.end(),
                                    [&](int64_t rows) { return rows == first; });
  return one_size && (ambiguous_ || (left_ && left_->is_ambiguous(first)));
}

void ForwardPass::note_sources(const tape::Tape& tape) {
  const std::vector<bool> found = tape::from_samples(tape, inputs_);
  const size_t left = left_ ? left_->count() : 0;
  const size_t own = found.size() - std::min(found.size(), left);  // an opaque tape has no results
  from_samples_.resize(std::max(from_samples_.size(), own), false);
  for (size_t i = 0; i < own; ++i) from_samples_[i] = from_samples_[i] || found[i];
}

bool ForwardPass::may_stand_once() const {
  return std::find(from_samples_.begin(), from_samples_.end(), false) != from_samples_.end();
}

void ForwardPass::hand_out_left(const Batch& outputs) {
  if (!left_) return;
  LeftOutputs::Arrange arrange;
  if (call_->trimming) {
    arrange = [this](const at::Tensor& joined, int64_t dim) {
      return call_->trimming->unsorted(joined, dim);
    };
  }
  left_->hand_out(row_counts_, outputs, arrange);
  call_->left_on_module = left_->not_joined();
}

void ForwardPass::roll_back() {
  const Unwatched unwatched;
  call_->run->roll_back();
  before_.restore();
}

Batch ForwardPass::finish() {
  WrapRun& run = *call_->run;
  {
    const memory::HighWater::Pause apart(planners_mark_);
    run.engine().forwards().learn_numbers();
    run.engine().checks().look();
  }
  finishing_ = true;
  const at::NoGradGuard no_grad;
  if (call_->budget && recording_) {
    call_->live_before_loss = memory::live(call_->device);
    call_->during_loss = std::make_unique<memory::HighWater>(call_->device);
  }
  if (!cut()) outputs_ = run.take_outputs();
  int64_t row = 0;
  for (size_t i = 0; i < outputs_.size() && recording_ && !cut(); ++i) {
    run.keep_numbers({row, row + row_counts_[i]}, numbers_of(outputs_[i]));
    row += row_counts_[i];
  }
  if (setup_.problem.trimming) setup_.problem.trimming->sizes = row_counts_;
  JoinedOutputs joined =
      join(std::move(outputs_), row_counts_, from_samples_, call_->findings.rows_seen.dims, losses_,
           own_, *setup_.problem.inputs);
  if (!run.engine().checks().found()) check_reduce(joined);
  run.finish_forward();
  if (recording_) {
    for (const ParameterRule::Found& each : run.engine().forwards().written_parameters()) {
      values_->add(each.parameter, each.memory, each.values);
    }
  }
  if (cut() && options_.static_graph) {
    const auto own = call_->leaves.begin() + static_cast<std::ptrdiff_t>(parameters_);
    run.learn(wants_gradient_, {own, call_->leaves.end()}, ambiguous_,
              left_ ? left_->entries() : std::vector<LeftOutputs::Entry>());
  }
  call_->wrapped->keep(call_->kind, call_->findings);
  Batch outputs = joined.whole;
  if (!recording_ ||
      std::find(wants_gradient_.begin(), wants_gradient_.end(), true) == wants_gradient_.end()) {
    if (call_->trimming) outputs = call_->trimming->unsorted(outputs);
    hand_out_left(outputs);
    return outputs;
  }
  const auto& renormed = run.engine().forwards().watch().renormed();
  for (const auto& [tensor, wanted] : call_->requires_grad) {
    // Another call may scale other rows of it; what forward writes is put back for it.
    if (renormed->contains(tensor) || values_->has_parameter(tensor)) continue;
    call_->parameter_versions.push_back(Version::of("a parameter", tensor));
  }
  for (const at::Tensor& tensor : call_->inputs.tensors()) {
    call_->input_versions.push_back(Version::of("an input", tensor));
  }
  call_->outputs = std::move(joined);
  if (run.engine().will_run_again() && !run.engine().forwards().state().runs().quiet()) {
    call_->runs = run.engine().forwards().state().take_runs();
  }
  *call_->at_work = false;
  call_->nodes.end_here();
  call_->wrapped->note_recorded(call_->nodes);
  attach_node(call_, inputs_, wants_gradient_, outputs);
  if (!renormed->empty()) call_->renormed = renormed;
  if (call_->store) call_->graph_bytes = run.engine().kept_graph_bytes();
  if (call_->trimming) {
    const at::AutoGradMode recording(/*enabled=*/true);
    outputs = call_->trimming->unsorted(outputs);
  }
  hand_out_left(outputs);
  return outputs;
}

}  // namespace infinitybatch
