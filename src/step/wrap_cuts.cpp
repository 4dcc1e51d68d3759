#include "wrap_cuts.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/step/admission.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {

WrapCuts::WrapCuts(WrappedCall& call, const Job& job, std::shared_ptr<const BufferValues> buffers,
                   bool recording, std::function<Batch(const Batch&)> forward)
    : call_(call),
      buffers_(std::move(buffers)),
      inputs_(BatchSource::from(call.inputs, "inputs")),
      targets_(targets_source(Batch(), inputs_.size)),
      model_(*job.model),
      job_(job) {
  // Each time new leaves: their gradients are this micro-batch's.
  inputs_.rows = [&call](int64_t begin, int64_t end) { return call.micro_batch({begin, end}); };
  model_.forward = std::move(forward);
  job_.model = &model_;
  job_.inputs = &inputs_;
  job_.targets = &targets_;
  job_.outside = this;
  job_.cut = true;
  job_.nested = true;
  job_.interrupt = call.wrapped->options.interrupt;
  if (job_.match_native_rng) {
    draw_laws_ = call.wrapped->draw_laws_of(job_);
    job_.draw_laws = &draw_laws_;
  }
  if (call.wrapped->options.static_graph) {
    kind_ = kind_of_forward(job_, call.wanted_inputs, recording);
    known_ = call.wrapped->static_forward_of(job_, kind_);
    job_.static_tapes = &known_.tapes;
  }
  {
    const std::lock_guard<std::mutex> lock(call.wrapped->mutex);
    job_.check_recordings = !call.wrapped->checked.contains(program_kind_of(job_));
    if (job_.store != nullptr) store_ = call.wrapped->store;
  }
  executor_.emplace(job_);
}

WrapCuts::~WrapCuts() = default;

void WrapCuts::record(Rows rows) {
  executor_->run({Operation::record, 0}, rows);
}

void WrapCuts::forward(Plan plan) {
  plan_ = std::move(plan);
  const auto& instructions = plan_.instructions;
  const auto is = [](Operation operation) {
    return [operation](const Instruction& each) { return each.operation == operation; };
  };
  const auto loss =
      std::find_if(instructions.begin(), instructions.end(), is(Operation::whole_loss));
  loss_at_ = static_cast<size_t>(loss - instructions.begin());
  const auto first =
      std::find_if_not(instructions.begin(), instructions.end(), is(Operation::record));
  run(static_cast<size_t>(first - instructions.begin()), loss_at_);
}

void WrapCuts::run(size_t from, size_t to) {
  std::vector<int64_t> begins{0};
  for (const int64_t size : plan_.micro_batch_sizes) begins.push_back(begins.back() + size);
  offload::StoreStatistics before;
  if (store_) before = store_->statistics();
  for (size_t i = from; i < to; ++i) {
    const Instruction& instruction = plan_.instructions[i];
    Rows rows;
    if (instruction.micro_batch >= 0) {
      const auto index = static_cast<size_t>(instruction.micro_batch);
      rows = {begins[index], begins[index + 1]};
    }
    executor_->run(instruction, rows);
  }
  if (store_) call_.add_offloaded(OffloadedMeanwhile(before, store_->statistics()));
}

void WrapCuts::offload_next_time() const {
  if (store_ || call_.wrapped->options.offload.when == Offload::When::never) return;
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  call_.wrapped->offloaded.insert(signature_of(job_));
}

std::vector<Batch> WrapCuts::take_outputs() {
  std::vector<Batch> outputs;
  for (auto& [begin, part] : parts_) outputs.push_back(std::exchange(part.outputs, Batch()));
  return outputs;
}

void WrapCuts::finish_forward() {
  executor_->finish_forward();
  call_.wrapped->keep_draw_laws(job_);
  const std::lock_guard<std::mutex> lock(call_.wrapped->mutex);
  call_.wrapped->checked.insert(program_kind_of(job_));
  model_.forward = nullptr;
}

void WrapCuts::learn(std::vector<bool> wants_gradient, std::vector<NamedParameter> leaves,
                     bool ambiguous, std::vector<LeftOutputs::Entry> left) {
  known_.wants_gradient = std::move(wants_gradient);
  known_.leaves = std::move(leaves);
  known_.ambiguous = ambiguous;
  known_.left = std::move(left);
  call_.wrapped->keep_static_forward(kind_, known_);
}

std::vector<at::Tensor> WrapCuts::backward(const std::vector<at::Tensor>& gradients, bool keep) {
  if (used_up_) {
    throw StateError(
        "an earlier backward through these outputs failed half way, and what it needed is gone; "
        "run forward again, or give retain_graph=True to what may fail");
  }
  if (job_.static_tapes != nullptr) {
    // Tapes that are used again count no versions.
    for (const Version& version : call_.parameter_versions) version.check();
  }
  const StoreUse alone(*call_.wrapped, store_.get());
  try {
    seam_.emplace(call_, gradients);
    buffers_->restore();
    used_up_ = !keep;
    executor_->begin_backward(keep);
    std::vector<at::Tensor> sums = run_backward();
    seam_.reset();
    if (keep) forget_gradients();
    return sums;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    executor_->sinks().uninstall();
    executor_->run({Operation::free}, {});
    executor_->sinks().take();
    seam_.reset();
    if (keep) {
      forget_gradients();
    } else if (used_up_) {
      executor_.reset();  // what waits is of no use any more
    }
    throw;
  }
}

void WrapCuts::forget_gradients() {
  // As in front of another backward.
  executor_->begin_backward(/*keep=*/true);
  executor_->sinks().uninstall();
}

std::vector<at::Tensor> WrapCuts::run_backward() {
  const bool hands_out = plan_.instructions.back().operation == Operation::hand_out;
  run(loss_at_ + 1, plan_.instructions.size() - (hands_out ? 1 : 0));
  autograd::GradientSinks& sinks = executor_->sinks();
  sinks.uninstall();
  if (sinks.has_other_leaves()) {
    throw Unsupported(
        "the graph of a segment ends in a leaf that requires grad and that forward did not show, "
        "so its gradient would be lost; give batch_coupling=\"per_micro_batch\", or call the inner "
        "module");
  }
  if (seam_->differs()) {
    throw Unsupported(
        "the part of forward after the last op of the whole batch gave other outputs when it was "
        "replayed, so its gradient would not belong to the loss; a kernel in it is not "
        "deterministic");
  }
  std::vector<at::Tensor> sums = sinks.take();
  sums.insert(sums.end(), seam_->of_inputs().begin(), seam_->of_inputs().end());
  return sums;
}

void WrapCuts::take(Rows rows, const Batch& outputs) {
  const Batch seen = detached(outputs);
  parts_[rows.begin] = {seen, numbers_of(seen)};
}

void WrapCuts::compare(Rows rows, const Batch& outputs) {
  seam_->compare(rows, parts_.at(rows.begin).numbers, outputs);
}

at::Tensor WrapCuts::gradient(Rows rows, size_t leaf, const at::Tensor& output) const {
  return seam_->gradient(rows, leaf, output);
}

void WrapCuts::collect(Rows rows, const Batch& inputs) {
  seam_->collect(rows, inputs);
}

}  // namespace infinitybatch
