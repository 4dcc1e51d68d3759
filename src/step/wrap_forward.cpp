#include "wrap_forward.hpp"

#include "meter.hpp"
#include "wrap_cuts.hpp"

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/join.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/unwatched.hpp>
#include <infinitybatch/coupled/foreign_draws.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/coupled/whole_batch_op.hpp>
#include <infinitybatch/execute/copied_batch.hpp>
#include <infinitybatch/execute/execution_log.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/tape/recorder.hpp>
#include <infinitybatch/tape/sample_flow.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

namespace infinitybatch {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

std::vector<uint32_t> versions_of(const Batch& batch) {
  std::vector<uint32_t> versions;
  for (const at::Tensor& tensor : batch.tensors()) {
    versions.push_back(tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version()));
  }
  return versions;
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

ForwardPass::ForwardPass(std::shared_ptr<Wrapped> wrapped, const Job& job, const Batch& inputs)
    : options_(wrapped->options),
      exact_(options_.batch_coupling == BatchCoupling::exact),
      recording_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()),
      call_(std::make_shared<WrappedCall>()),
      buffer_rule_(job.buffers, exact_),
      job_(job) {
  call_->wrapped = std::move(wrapped);
  call_->nodes = NodeRange::from_here();
  call_->device = job.device;
  call_->devices = devices_of(job);
  call_->buffers = job.buffers;
  call_->modes = tape::Modes::current();
  if (job.offloads_graphs) call_->store = call_->wrapped->store_on(job.device);
  read(inputs);
  for (const NamedParameter& parameter : job.parameters) read(parameter);
  parameters_ = call_->leaves.size();
  watch_.know_parameters(job.parameters);
  if (exact_ && options_.left_places) {
    left_.emplace(options_.left_places, batch_size(inputs, "inputs"),
                  room_for_left(*call_->wrapped, job.device), !options_.static_graph);
  }
  if (options_.match_native_rng) watch_.watch_draws(call_->devices);
  parameter_rule_.emplace(job.parameters, watch_.memory(), exact_);
  state_.emplace(watch_.memory());
  state_->collect_left();
  state_at_work_ = &*state_;
  for (const BufferSlot& slot : job.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers_.push_back(std::move(buffer));
  }
  before_ = RngSnapshot::capture(call_->devices);
  rows_ = BatchSource::from(call_->inputs, "inputs");
  if (!options_.micro_batch_size) few_.look(rows_.size);
  known_ = call_->examined = call_->wrapped->is_examined(rows_, job_);
  experiment_.emplace(&call_->examined, call_->devices, rows_.size);
  call_->rows_seen = call_->wrapped->rows_seen_of(rows_, job_);
  if (exact_ && call_->rows_seen.due(rows_.size)) watch_peak(high_water_, job_.device);
  if (recording_) values_ = std::make_shared<BufferValues>(job.buffers);
  // Casts made before lead into graphs of others.
  at::autocast::clear_cache();
}

void ForwardPass::examine() {
  count_rows();
  experiment_->run([&](Rows rows) { return call_->micro_batch(rows); }, /*last=*/true);
}

void ForwardPass::aside(Rows rows, bool trial, const std::function<void()>& forward) {
  const RngSnapshot random = RngSnapshot::capture(call_->devices);
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(job_.buffers);
  const auto told = std::tuple(part_of_batch_, part_);
  CarriedState trial_state(watch_.memory(), *state_);
  state_at_work_ = &trial_state;
  part_of_batch_ = {rows.size(), rows_.size, options_.match_native_rng};
  part_ = rows.size() < rows_.size;
  const auto undo = [&] {
    state_at_work_ = &*state_;
    trial_state.roll_back();
    trial ? parameter_rule_->end_trial() : parameter_rule_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
    std::tie(part_of_batch_, part_) = told;
    at::autocast::clear_cache();
  };
  try {
    forward();
  } catch (...) {
    undo();
    watch_.forget_errors();
    throw;
  }
  undo();
}

void ForwardPass::count_rows() {
  const std::optional<Rows> here = experiment_->may_count();
  if (!here || call_->cuts || wrote_inputs_) return;
  const Rows rows = other_rows(*here, rows_.size);
  try {
    aside(rows, /*trial=*/false, [&] {
      const Batch micro = call_->micro_batch(rows);
      tape::Recorder recorder(micro, buffers_, call_->devices);
      const Batch outputs = recorder.run([&] { return call_model(micro, nullptr); });
      experiment_->meet_others(rows.size(), micro, recorder.finish(outputs), outputs);
    });
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    experiment_->meet_no_others();  // nobody can tell
  }
}

void ForwardPass::learn_numbers(int64_t first) {
  if (!exact_ || !state_->runs().wants_to_learn()) return;
  const RngSnapshot random = RngSnapshot::capture(call_->devices);
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(job_.buffers);
  state_at_work_ = nullptr;
  const auto undo = [&] {
    parameter_rule_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
    at::autocast::clear_cache();
  };
  try {
    state_->runs().learn({0, first}, rows_.size, [&](Rows rows) {
      const at::NoGradGuard no_grad;  // nobody goes back
      part_of_batch_ = {rows.size(), rows_.size, options_.match_native_rng};
      try {
        const Batch micro = call_->micro_batch(rows);
        Batch outputs = call_model(wrote_inputs_ ? copied(micro) : micro, nullptr);
        undo();
        return outputs;
      } catch (...) {
        keep_foreign_exception(std::current_exception());
        undo();
        throw;
      }
    });
  } catch (...) {
    state_at_work_ = &*state_;
    throw;
  }
  state_at_work_ = &*state_;
}

void ForwardPass::note_examined() const {
  if (!known_ && call_->examined) call_->wrapped->note_examined(rows_, job_);
  call_->wrapped->note_rows_seen(rows_, job_, call_->rows_seen);
}

Batch ForwardPass::run(const Split& split, int64_t total) {
  std::vector<int64_t> sizes = split.sizes;
  offload::StoreStatistics before;
  if (call_->store) before = call_->store->statistics();
  call_->overlaps = split.overlaps;
  const bool one_size = sizes.size() > 1 && sizes.front() == sizes.back();
  const size_t kept = std::min(static_cast<size_t>(split.retained), sizes.size());
  size_t keep_from = sizes.size() - kept;
  int64_t row = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    run({row, row + sizes[i]}, total, i >= keep_from);
    row += sizes[i];
    if (i == 0 && one_size && wants_another_size()) {
      --sizes[1];
      sizes.insert(sizes.begin() + 2, 1);
      ++keep_from;  // as many rows as planned
    }
  }
  Batch outputs = finish();
  if (call_->store) {
    call_->add_offloaded(OffloadedMeanwhile(before, call_->store->statistics()));
    call_->add_graphs();
  }
  return outputs;
}

Batch ForwardPass::run_cuts(std::vector<int64_t> sizes, bool overlap,
                            std::optional<int64_t> segments) {
  part_ = sizes.size() > 1;
  Job job = job_;
  job.examined = &call_->examined;
  if (exact_) job.rows_seen = &call_->rows_seen;
  call_->cuts =
      std::make_unique<WrapCuts>(*call_, job, values_, recording_, [this](const Batch& micro) {
        const uint64_t first_node = at::sequence_number::peek();
        Batch outputs = run_model(micro);
        learn_from_recording(without_left(outputs), micro, first_node);
        return outputs;
      });
  WrapCuts& cuts = *call_->cuts;
  wants_gradient_ = cuts.known().wants_gradient;
  ambiguous_ = cuts.known().ambiguous;
  if (left_) left_->adopt(cuts.known().left);
  for (const NamedParameter& leaf : cuts.known().leaves) {
    if (!known_leaves_.insert(leaf.tensor.unsafeGetTensorImpl()).second) continue;
    call_->leaves.push_back(leaf);
    cuts.adopt(leaf.tensor);
  }
  int64_t row = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    cuts.record({row, row + sizes[i]});
    if (i == 0 || may_stand_once()) note_sources(cuts.tape({row, row + sizes[i]}));
    row += sizes[i];
    // A second size tells along which dimension outputs lie. Two halves: layers may refuse a
    // single sample.
    const bool another = ambiguous_ || may_stand_once() || cuts.may_count();
    if (i == 0 && another && sizes.size() > 1 && sizes[0] > 1 && sizes.front() == sizes.back()) {
      sizes.push_back(sizes[1] / 2);
      sizes[1] -= sizes.back();
    }
  }
  if (segments && cuts.segments() != *segments) throw SegmentsChanged(cuts.segments());
  Plan plan = cut_plan(sizes, cuts.segments(), /*retained=*/0, /*coupled=*/true,
                       /*penalty=*/false);
  if (job_.store != nullptr) plan = with_offload(std::move(plan), overlap);
  cuts.forward(std::move(plan));
  for (Batch& part : cuts.take_outputs()) {
    outputs_.push_back(without_left(std::move(part), /*keep=*/true));
  }
  row_counts_ = std::move(sizes);
  return finish();
}

void ForwardPass::learn_from_recording(const Batch& outputs, const Batch& micro,
                                       uint64_t first_node) {
  ambiguous_ = ambiguous_ || is_ambiguous(outputs, batch_size(micro, "inputs"), {}, options_);
  if (!recording_) return;
  const size_t known = call_->leaves.size();
  note_graph(outputs, micro, first_node, /*dropped=*/false);
  for (size_t i = known; i < call_->leaves.size(); ++i) {
    call_->cuts->adopt(call_->leaves[i].tensor);
  }
}

bool ForwardPass::saw_coupling() const {
  return drew_ || std::any_of(watch_.seen().begin(), watch_.seen().end(),
                              [](const auto& seen) { return coupled::has_stand_in(seen.op); });
}

void ForwardPass::roll_back() {
  const Unwatched unwatched;
  if (call_->cuts) call_->cuts->roll_back();
  buffer_rule_.roll_back();
  parameter_rule_->roll_back();
  watch_.memory().undo();
  watch_.renormed()->undo();
  watch_.undo_draws();
  state_->roll_back();
  before_.restore();
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

Batch ForwardPass::call_model(const Batch& micro, GraphMemory* memory) {
  const coupled::PartOfBatch part_of_batch(exact_ ? part_of_batch_ : std::nullopt);
  const coupled::CouplingWatch::Scope watching(watch_);
  const CarriedState::Scope stateful(exact_ ? state_at_work_ : nullptr, part_, rows_.size);
  const auto forward = [&] { return run_model(micro); };
  Batch outputs = memory != nullptr ? memory->watch(forward) : forward();
  if (exact_ && recording_ && !own_backward_ && call_->rows_seen.looked == 0) {
    own_backward_ = own_backward_of(outputs);
  }
  watch_.rethrow();
  memory::Limit::check();
  return outputs;
}

Batch ForwardPass::run_model(const Batch& micro) {
  const int64_t rows = batch_size(micro, "inputs");
  const auto forward = [&] {
    Batch given;
    few_.watch(rows, [&] { given = call_->wrapped->model.forward(micro); });
    return given;
  };
  if (!left_) return forward();
  Batch outputs = left_->with_left(rows, forward);
  if (left_->count() > 0) call_->wrapped->joining = true;
  return outputs;
}

Batch ForwardPass::without_left(Batch outputs, bool keep) {
  if (!left_) return outputs;
  return left_->without_left(std::move(outputs), keep, /*copies=*/job_.offloads_graphs);
}

Batch ForwardPass::call_model_and_keep(const Batch& micro, GraphMemory* memory) {
  WrappedCall::Kept& kept = call_->keep();
  if (kept.sinks) {
    kept.sinks->install();
  } else {
    kept.sinks = std::make_unique<autograd::GradientSinks>(call_->leaves, /*nested=*/true);
    kept.leaves = call_->leaves.size();
  }
  struct Uninstall {
    autograd::GradientSinks& sinks;
    ~Uninstall() { sinks.uninstall(); }
  } const uninstall{*kept.sinks};
  return call_model(micro, memory);
}

void ForwardPass::leave(size_t part) {
  settle();
  WrappedCall::Kept& kept = call_->keep();
  const auto graph = kept.graphs.find(part);
  if (graph == kept.graphs.end()) return;
  leaving_ = part;
  if (!call_->overlaps) return settle();
  graph->second.memory->start_leaving(*job_.store, memory_of(outputs_[part]));
}

void ForwardPass::settle() {
  if (!leaving_) return;
  const size_t index = *std::exchange(leaving_, std::nullopt);
  WrappedCall::Kept& kept = call_->keep();
  const auto found = kept.graphs.find(index);
  if (found == kept.graphs.end()) return;
  WrappedCall::Kept::Graph& graph = found->second;
  WrappedCall::Part& part = call_->parts[index];
  part.numbers = Batch();  // outputs, too
  offload_graph(*graph.memory, *job_.store, graph.outputs, outputs_[index]);
  part.numbers = numbers_of(outputs_[index]);
}

void ForwardPass::run(Rows rows, int64_t total, bool keep) {
  ExecutionLog::note("wrap forward", rows);
  if (options_.interrupt) options_.interrupt();
  if (!row_counts_.empty()) learn_numbers(row_counts_.front());
  keep = keep && recording_;
  const bool offloads = keep && job_.offloads_graphs;
  part_of_batch_ = {rows.size(), total, options_.match_native_rng};
  part_ = rows.size() < total;
  const Batch micro = call_->micro_batch(rows);
  Batch outputs;
  WrappedCall::Part part;
  part.rows = rows;
  if (recording_) {
    part.random = RngSnapshot::capture(call_->devices);
    part.buffers = exact_ ? values_ : std::make_shared<BufferValues>(call_->buffers);
  }
  std::optional<GraphMemory> memory;
  if (offloads) memory.emplace().know(micro);
  const auto call = [&] {
    GraphMemory* const notes = memory ? &*memory : nullptr;
    const coupled::ForeignDraws foreign(options_.match_native_rng && part_);
    Batch given = keep ? call_model_and_keep(micro, notes) : call_model(micro, notes);
    buffer_rule_.note_means(watch_.take_means(), rows.size());
    if (exact_) watch_.check(rows.size(), total);
    if (!options_.match_native_rng || !part_) return given;
    const auto drew = watch_.drew() ? watch_.drew() : foreign.drew();
    drew_ = drew.has_value();
    if (drew) coupled::refuse_draws(*drew, rows.size(), total);
    return given;
  };
  const uint64_t first_node = at::sequence_number::peek();
  const std::vector<uint32_t> versions = versions_of(micro);
  const bool first = row_counts_.empty();
  if (!recording_ && first && rows.size() < total) {
    // Nothing will be replayed: it only tells what comes from the samples.
    tape::Recorder recorder(micro, buffers_, call_->devices);
    outputs = recorder.run(call);
    const tape::Tape tape = recorder.finish(outputs);
    note_sources(tape);
    if (experiment_->wants(rows)) experiment_->take(rows, micro, tape);
  } else if (!recording_ && experiment_->awaits(rows)) {
    tape::Recorder recorder(micro, buffers_, call_->devices);
    outputs = recorder.run(call);
    experiment_->meet_others(rows.size(), micro, recorder.finish(outputs), outputs);
  } else if (!recording_) {
    outputs = call();
  } else if (!call_->wrapped->use_tapes) {
    part.tape.opaque = "an earlier replay gave other outputs than its recording";
    outputs = call();
  } else {
    tape::Recorder recorder(micro, buffers_, call_->devices);
    outputs = recorder.run(call);
    part.tape = recorder.finish(outputs);
    const bool across = std::any_of(
        watch_.seen().begin(), watch_.seen().end(),
        [](const coupled::CoupledOp& seen) { return seen.op == "infinitybatch::across_batch"; });
    // The tape has its number alone, which is forgotten with this pass.
    if (across && !part.tape.opaque) part.tape.opaque = "a function of across_batch";
    if (part.tape.refusal) {
      throw Unsupported(*part.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
    if (first || may_stand_once()) note_sources(part.tape);
    if (experiment_->awaits(rows)) {
      experiment_->meet_others(rows.size(), micro, part.tape, outputs);
    } else if (experiment_->wants(rows)) {
      experiment_->take(rows, micro, part.tape);
    }
  }
  outputs = without_left(std::move(outputs), /*keep=*/true);
  if (recording_) note_graph(outputs, micro, first_node, /*dropped=*/!keep && part_, keep);
  refuse_sparse(outputs);
  outputs_.push_back(detached(outputs));
  row_counts_.push_back(rows.size());
  if (recording_) {
    part.numbers = numbers_of(outputs_.back());
    call_->parts.push_back(std::move(part));
  }
  at::autocast::clear_cache();
  if (keep) {
    // A leaf that the sinks do not know has its own accumulator in this graph.
    WrappedCall::Kept& kept = call_->keep();
    if (kept.leaves == call_->leaves.size()) {
      kept.graphs[call_->parts.size() - 1] = {std::move(outputs), micro, std::move(memory)};
    } else {
      kept.graphs.clear();
    }
  }
  outputs = Batch();
  buffer_rule_.end_micro_batch();
  parameter_rule_->end_micro_batch();
  // What was restored under a graph could belong to what it has saved; and micro-batches are rows
  // of one tensor, so that torch takes what one of them writes for written in all.
  const bool restored = buffer_rule_.written() || parameter_rule_->written();
  const bool wrote = versions_of(micro) != versions;
  wrote_inputs_ = wrote_inputs_ || wrote;
  if (keep && (restored || wrote || !keeps_)) call_->keep().graphs.clear();
  if (offloads) leave(call_->parts.size() - 1);
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
  if (!keep) call_->keep().sinks->release(left);
  return keep;
}

bool ForwardPass::wants_another_size() const {
  if (row_counts_.empty() || row_counts_.front() < 2) return false;
  const bool one_size = std::all_of(row_counts_.begin(), row_counts_.end(),
                                    [&](int64_t rows) { return rows == row_counts_.front(); });
  return one_size && (is_ambiguous(outputs_[0], row_counts_[0], from_samples_, options_) ||
                      (left_ && left_->is_ambiguous(row_counts_[0])));
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

/// Notes where gradients go that are no parameters of the model, before the graph is dropped.
void ForwardPass::note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node,
                             bool dropped, bool kept) {
  std::vector<at::Tensor> roots;
  wants_gradient_.resize(std::max(wants_gradient_.size(), outputs.leaves().size()), false);
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    wants_gradient_[i] = true;
    roots.push_back(tensor);
  }
  std::unordered_set<c10::TensorImpl*> of_inputs;
  for (const at::Tensor& tensor : micro.tensors()) of_inputs.insert(tensor.unsafeGetTensorImpl());
  const auto note_leaf = [&](const at::Tensor& leaf) {
    c10::TensorImpl* identity = leaf.unsafeGetTensorImpl();
    if (of_inputs.contains(identity) || !known_leaves_.insert(identity).second) return;
    call_->leaves.push_back({"a tensor that forward reads", leaf});
  };
  for (const at::Tensor& root : roots) {
    if (root.is_leaf()) note_leaf(root);
  }
  autograd::walk_graph(roots, [&](Node& node) {
    if (const auto* accumulator = dynamic_cast<AccumulateGrad*>(&node)) {
      note_leaf(accumulator->variable);
    } else if (node.sequence_nr() < first_node) {
      throw Unsupported(
          "forward reads a tensor that was computed before with a graph (" + node.name() +
          "), or that one micro-batch leaves for the next, so its gradient cannot be split; pass "
          "it "
          "as an input (shared, if every sample needs it), or compute it inside forward");
    }
  });
  std::vector<at::Tensor> left = state_->take_left();
  keeps_ = !kept || left.empty() || may_keep_beside(left);
  if (kept && keeps_ && !part_ && call_->wrapped->left_read) {
    // Through a hook or a closure, which nobody knows.
    call_->keep().sinks->release(roots);
    keeps_ = false;
  }
  if (!dropped) return;
  roots.insert(roots.end(), left.begin(), left.end());
  end_graphs(roots);
}

void ForwardPass::hand_out_left(const Batch& outputs) {
  if (!left_) return;
  left_->hand_out(row_counts_, outputs);
  call_->left_on_module = left_->not_joined();
}

Batch ForwardPass::finish() {
  settle();
  std::exception_ptr mixed;
  try {
    examine();
  } catch (const CouplingError&) {
    mixed = std::current_exception();  // others say more
  }
  try {
    const memory::HighWater::Pause apart(planners_mark_);
    if (!mixed) look_at_rows();
  } catch (const CouplingError&) {
    mixed = std::current_exception();
  }
  finishing_ = true;
  const at::NoGradGuard no_grad;
  if (call_->budget && recording_) {
    call_->live_before_loss = memory::stats(call_->device).live;
    call_->during_loss = std::make_unique<memory::HighWater>(call_->device);
  }
  JoinedOutputs joined =
      join(std::move(outputs_), row_counts_, from_samples_, call_->rows_seen.dims, options_);
  if (!mixed) check_reduce(joined);
  buffer_rule_.commit();
  parameter_rule_->commit();
  state_->runs().commit();
  if (mixed) std::rethrow_exception(mixed);
  if (call_->cuts) {
    call_->cuts->finish_forward();
    if (options_.static_graph) {
      const auto own = call_->leaves.begin() + static_cast<std::ptrdiff_t>(parameters_);
      call_->cuts->learn(wants_gradient_, {own, call_->leaves.end()}, ambiguous_,
                         left_ ? left_->entries() : std::vector<LeftOutputs::Entry>());
    }
  }
  note_examined();
  Batch outputs = joined.whole;
  if (!recording_ ||
      std::find(wants_gradient_.begin(), wants_gradient_.end(), true) == wants_gradient_.end()) {
    watch_.renormed()->commit();
    hand_out_left(outputs);
    return outputs;
  }
  for (const auto& [tensor, wanted] : call_->requires_grad) {
    // Another call may scale other rows of it.
    if (watch_.renormed()->contains(tensor)) continue;
    call_->parameter_versions.push_back(Version::of("a parameter", tensor));
  }
  for (const at::Tensor& tensor : call_->inputs.tensors()) {
    call_->input_versions.push_back(Version::of("an input", tensor));
  }
  call_->outputs = std::move(joined);
  const bool again = std::any_of(call_->parts.begin(), call_->parts.end(),
                                 [](const auto& part) { return part.tape.opaque.has_value(); });
  if (again && !state_->runs().quiet()) call_->runs = state_->take_runs();
  *call_->at_work = false;
  call_->nodes.end_here();
  call_->wrapped->note_recorded(call_->nodes);
  attach_node(call_, inputs_, wants_gradient_, outputs);
  watch_.renormed()->commit();
  if (!watch_.renormed()->empty()) call_->renormed = watch_.renormed();
  hand_out_left(outputs);
  return outputs;
}

}  // namespace infinitybatch
