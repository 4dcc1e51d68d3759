#include "step/wrap_run.hpp"

#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/join.hpp"
#include "core/out_of_memory.hpp"
#include "coupled/coupling_watch.hpp"
#include "execute/output_comparison.hpp"
#include "execute/schedule.hpp"
#include "step/admission.hpp"
#include "step/kept_boundaries.hpp"
#include "step/sorted_batch.hpp"
#include "tape/modes.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {

WrapRun::WrapRun(WrappedCall& call, const Setup& setup, std::shared_ptr<const BufferValues> buffers,
                 bool recording, std::function<Batch(const Batch&)> forward, Taken taken)
    : call_(call),
      buffers_(std::move(buffers)),
      recording_(recording),
      taken_(std::move(taken)),
      inputs_(BatchSource::from(call.inputs, "inputs")),
      targets_(no_targets(Batch(), inputs_.size)),
      model_(*setup.problem.model),
      setup_(setup) {
  // Each time new leaves: their gradients are this micro-batch's.
  inputs_.rows = [&call](int64_t begin, int64_t end) { return call.micro_batch({begin, end}); };
  model_.forward = std::move(forward);
  setup_.problem.model = &model_;
  setup_.problem.inputs = &inputs_;
  setup_.problem.targets = &targets_;
  setup_.resources.findings = &call.findings;
  setup_.problem.loss = static_cast<ExternalLoss&>(*this);
  setup_.problem.reentrant = true;
  setup_.problem.interrupt = call.wrapped->options.interrupt;
  setup_.problem.further_devices = call.devices;
  if (!setup_.strategy.is_cut())
    setup_.problem.on_micro_batch =
        showing_samples(setup_.problem.trimming, call.wrapped->options.on_micro_batch);
  if (!setup_.strategy.is_cut() && !setup_.strategy.offloads_graphs()) {
    setup_.strategy.offload = Strategy::Offloads::nothing;
    setup_.resources.store = nullptr;
  }
  if (setup_.strategy.is_cut() && call.wrapped->options.static_graph) {
    kind_ = kind_of_forward(call.kind, setup_.problem, call.wanted_inputs, recording);
    known_ = call.wrapped->static_forward_of(setup_.problem, kind_);
    setup_.strategy.reuses_tapes = true;
    setup_.resources.static_tapes = &known_.tapes;
  }
  if (setup_.strategy.offloads()) {
    const std::lock_guard<std::mutex> lock(call.wrapped->mutex);
    store_ = call.wrapped->store;
  }
  if (store_) told_ = store_->statistics();
  executor_.emplace(setup_);
  if (!setup_.strategy.is_cut()) executor_->forwards().state().collect_left();
  if (!call.wrapped->options.micro_batch_size) executor_->look_for_few_rows();
}

WrapRun::~WrapRun() = default;

void WrapRun::record(Rows rows, bool keep) {
  executor_->run({keep ? Operation::retain : Operation::record, 0}, rows);
}

void WrapRun::begin(Plan plan) {
  plan_ = std::move(plan);
  begins_ = {0};
  for (const int64_t size : plan_.micro_batch_sizes) begins_.push_back(begins_.back() + size);
  const auto& instructions = plan_.instructions;
  const auto loss =
      std::find_if(instructions.begin(), instructions.end(),
                   [](const Instruction& each) { return each.operation == Operation::whole_loss; });
  loss_at_ = static_cast<size_t>(loss - instructions.begin());
}

Rows WrapRun::rows_of(const Instruction& instruction) const {
  if (instruction.micro_batch < 0) return {};
  const auto index = static_cast<size_t>(instruction.micro_batch);
  return {begins_[index], begins_[index + 1]};
}

void WrapRun::run(size_t from, size_t to) {
  for (size_t i = from; i < to; ++i) {
    const Instruction& instruction = plan_.instructions[i];
    executor_->run(instruction, rows_of(instruction));
    if (seam_ && instruction.operation == Operation::free) end_backward_of_part();
  }
}

void WrapRun::tell_copies() {
  if (!store_) return;
  const offload::StoreStatistics before = std::exchange(told_, store_->statistics());
  call_.add_offloaded(OffloadedMeanwhile(before, told_));
}

bool WrapRun::drop_graphs() {
  const std::unique_lock<std::recursive_mutex> alone(at_work_, std::try_to_lock);
  return alone && executor_ && executor_->drop_graphs();
}

void WrapRun::end_backward_of_part() {
  // What a second forward has written.
  if (!setup_.strategy.is_cut() && setup_.problem.exact_coupling) buffers_->restore();
  if (!executor_->sinks().has_other_leaves()) return;
  throw Unsupported(
      setup_.strategy.is_cut()
          ? "the graph of a segment ends in a leaf that requires grad and that forward did not "
            "show, so its gradient would be lost; give batch_coupling=\"per_micro_batch\", or "
            "call the inner module"
          : "forward keeps a leaf that requires grad and that it makes anew each time, so its "
            "gradient would be lost; make it once, outside of forward");
}

void WrapRun::offload_next_time() const {
  if (store_ || call_.wrapped->options.offload.when == Offload::When::never) return;
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  call_.wrapped->known.memory_of(call_.kind).begin_offload();
}

bool WrapRun::may_keep_fewer() const {
  const Options& options = call_.wrapped->options;
  return executor_ && setup_.strategy.is_cut() && !store_ && options.memory_budget &&
         options.offload.when == Offload::When::never;
}

bool WrapRun::keep_fewer_boundaries(int64_t bytes) {
  if (!may_keep_fewer()) return false;
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  KnownMemory& memory = call_.wrapped->known.memory_of(call_.kind);
  KeptBoundaries kept = plan_.kept_boundaries;
  if (memory.boundaries) {
    const int64_t samples = setup_.problem.batch_size();
    const int64_t most = memory.boundaries->with(kept, samples).bytes - bytes;
    const Planner& planner = call_.wrapped->planners[call_.planner];
    if (keep_fewer(kept, {*memory.boundaries, planner, samples, *call_.budget, most})) {
      memory.kept = kept;
      keep_others(kept);
      used_up_ = false;
      return true;
    }
  }
  return false;
}

void WrapRun::leave_room_next_time(int64_t bytes) const {
  if (!may_keep_fewer()) return;
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  KnownMemory& memory = call_.wrapped->known.memory_of(call_.kind);
  if (!memory.boundaries) return;
  const int64_t samples = setup_.problem.batch_size();
  const int64_t now = memory.boundaries->with(memory.kept, samples).bytes;
  const auto fewer = memory.boundaries->within(now - std::max<int64_t>(bytes, 1), samples);
  memory.kept = fewer.value_or(memory.boundaries->least(samples)).kept;
}

bool WrapRun::begin_anew() {
  if (!may_keep_fewer()) return false;
  again_ = again_ || used_up_;
  used_up_ = false;
  return true;
}

void WrapRun::give_up() {
  if (used_up_) executor_.reset();  // what waits is of no use any more
}

/// With the wrapped model's lock held.
void WrapRun::keep_others(const KeptBoundaries& kept) {
  begin(cut_plan(plan_.micro_batch_sizes, plan_.segments, /*retained=*/0, /*coupled=*/true,
                 /*penalty=*/false, kept));
  call_.report->strategy_reason = plan_.explain_kept();
  again_ = true;
}

bool WrapRun::drop_boundaries() {
  const std::unique_lock<std::recursive_mutex> alone(at_work_, std::try_to_lock);
  const bool possible = alone && executor_ && setup_.strategy.is_cut() && !store_ && !again_ &&
                        !used_up_ && !setup_.strategy.reuses_tapes;
  if (!possible) return false;
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  KnownMemory& memory = call_.wrapped->known.memory_of(call_.kind);
  if (!memory.boundaries) return false;
  const KeptBoundaries least = memory.boundaries->least(setup_.problem.batch_size()).kept;
  if (call_.wrapped->options.micro_batch_size) memory.kept = least;  // no plan learns of it
  keep_others(least);
  executor_->begin_again();
  return true;
}

void WrapRun::go_forward_again() {
  executor_->begin_again();
  for (size_t i = 0; i < loss_at_; ++i) {
    Instruction instruction = plan_.instructions[i];
    const bool advances = instruction.operation == Operation::advance;
    if (!advances || instruction.segment + 1 == plan_.segments) continue;
    instruction.operation = Operation::recompute;
    executor_->run(instruction, rows_of(instruction));
  }
  again_ = false;
}

std::vector<Batch> WrapRun::take_outputs() {
  std::vector<Batch> outputs;
  for (auto& [begin, part] : parts_) outputs.push_back(std::exchange(part.outputs, Batch()));
  return outputs;
}

void WrapRun::finish_forward() {
  executor_->finish_forward();
  if (setup_.strategy.is_cut()) setup_.resources.findings->recordings_checked = true;
  model_.forward = nullptr;
}

void WrapRun::learn(std::vector<bool> wants_gradient, std::vector<NamedParameter> leaves,
                    bool ambiguous, std::vector<LeftOutputs::Entry> left) {
  known_.wants_gradient = std::move(wants_gradient);
  known_.leaves = std::move(leaves);
  known_.ambiguous = ambiguous;
  known_.left = std::move(left);
  known_.tapes.end_step();
  call_.wrapped->keep_static_forward(kind_, known_);
}

std::vector<at::Tensor> WrapRun::backward(const std::vector<at::Tensor>& gradients, bool keep) {
  if (used_up_) {
    throw StateError(
        "an earlier backward through these outputs failed half way, and what it needed is gone; "
        "run forward again, or give retain_graph=True to what may fail");
  }
  if (setup_.strategy.reuses_tapes) {
    // Tapes that are used again count no versions.
    for (const Version& version : call_.parameter_versions) version.check();
  }
  const StoreUse alone_in_store(*call_.wrapped, store_.get());
  const std::lock_guard<std::recursive_mutex> alone(at_work_);
  if (store_) told_ = store_->statistics();
  try {
    std::vector<at::Tensor> sums = run_backward_or_forward_again(gradients, keep);
    seam_.reset();
    if (keep) forget_gradients();
    tell_copies();
    return sums;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    executor_->sinks().uninstall();
    executor_->sinks().take();
    seam_.reset();
    executor_->abandon();
    tell_copies();
    if (keep) {
      forget_gradients();
    } else if (used_up_ && !(is_out_of_memory(std::current_exception()) && may_keep_fewer())) {
      executor_.reset();  // what waits is of no use any more
    }
    throw;
  }
}

void WrapRun::forget_gradients() {
  if (!setup_.strategy.is_cut()) return;
  // As in front of another backward.
  executor_->begin_backward(/*keep=*/true);
  executor_->sinks().uninstall();
}

/// Another call may have found that they are not to be believed.
void WrapRun::follow_tapes() {
  setup_.strategy.use_tapes(call_.wrapped->options.use_tapes, call_.wrapped->use_tapes);
}

std::vector<at::Tensor> WrapRun::run_backward_or_forward_again(
    const std::vector<at::Tensor>& gradients, bool keep) {
  if (!setup_.strategy.is_cut()) follow_tapes();
  if (auto sums = run_backward(gradients, keep)) return *std::move(sums);
  if (setup_.strategy.is_cut()) {
    throw Unsupported(
        "the part of forward after the last op of the whole batch gave other outputs when it was "
        "replayed, so its gradient would not belong to the loss; a kernel in it is not "
        "deterministic");
  }
  if (executor_->replayed()) {
    call_.wrapped->use_tapes = false;
    follow_tapes();
    if (auto sums = run_backward(gradients, keep)) return *std::move(sums);
  }
  throw forward_differs("the outputs");
}

std::optional<std::vector<at::Tensor>> WrapRun::run_backward(
    const std::vector<at::Tensor>& gradients, bool keep) {
  seam_.emplace(call_, gradients);
  buffers_->restore();
  executor_->begin_backward(keep, may_keep_fewer());
  used_up_ = setup_.strategy.is_cut() && !keep;
  if (again_) {
    go_forward_again();
    executor_->begin_backward(keep, may_keep_fewer());
  }
  const bool hands_out = plan_.instructions.back().operation == Operation::hand_out;
  run(loss_at_ + 1, plan_.instructions.size() - (hands_out ? 1 : 0));
  executor_->sinks().uninstall();
  std::vector<at::Tensor> sums = executor_->sinks().take();
  if (seam_->differs()) return std::nullopt;
  sums.insert(sums.end(), seam_->of_inputs().begin(), seam_->of_inputs().end());
  return sums;
}

Batch WrapRun::take(Rows rows, const Batch& inputs, Batch outputs) {
  if (setup_.strategy.is_cut()) {
    const Batch seen = detached(outputs);
    parts_[rows.begin] = {seen, numbers_of(seen)};
    return outputs;
  }
  refuse_sparse(outputs);
  outputs = taken_(rows, inputs, std::move(outputs));
  parts_[rows.begin] = {detached(outputs), Batch()};
  return outputs;
}

Batch WrapRun::forward_again(const Batch& inputs) {
  for (const Version& version : call_.parameter_versions) version.check();
  const auto run = [&] {
    Batch outputs;
    without_collectives(
        "forward",
        "once more in backward, which other ranks need not do as often; run it in the loss",
        [&] { outputs = call_.wrapped->model.forward(inputs); });
    const auto& trimming = setup_.problem.trimming;
    return trimming ? trimming->padded(outputs, inputs) : outputs;
  };
  const auto uncounted = [&] { return call_.runs ? call_.runs->uncounted(run) : run(); };
  const tape::ModesGuard modes;
  call_.modes.apply();
  if (!call_.renormed) return uncounted();
  // Rows that forward has scaled are not scaled again.
  coupled::CouplingWatch watch(call_.renormed);
  const coupled::CouplingWatch::Scope watching(watch);
  Batch outputs = uncounted();
  watch.rethrow();
  return outputs;
}

void WrapRun::compare(Rows rows, const Batch& outputs) {
  seam_->compare(rows, parts_.at(rows.begin).numbers, outputs);
}

at::Tensor WrapRun::gradient(Rows rows, size_t leaf, const at::Tensor& output) const {
  return seam_->gradient(rows, leaf, output);
}

void WrapRun::collect(Rows rows, const Batch& inputs) {
  seam_->collect(rows, inputs);
}

}  // namespace infinitybatch
