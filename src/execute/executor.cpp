#include "execute/executor.hpp"

#include "core/batch_form.hpp"
#include "core/unwatched.hpp"
#include "execute/execution_log.hpp"
#include "execute/external_loss.hpp"
#include "offload/store.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {

Executor::Executor(const Setup& setup)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      // Graphs that are not kept for a loss outside may be anybody's; without gradients there are
      // none.
      sinks_(at::GradMode::is_enabled() ? setup.problem.parameters : std::vector<NamedParameter>(),
             setup.problem.reentrant,
             /*installed=*/setup.strategy.is_cut() || setup.problem.loss.external() == nullptr),
      forwards_(setup, [this] { release(); }),
      checks_(setup, forwards_),
      total_(setup.problem.device) {
  if (setup.strategy.is_cut()) cut_pass_.emplace(setup, sinks_, forwards_.buffers());
  if (setup.problem.loss.external() != nullptr && setup.strategy.is_cut()) {
    // computes no loss here
  } else if (setup.problem.loss.separable() != nullptr) {
    share_.emplace(setup.problem, sinks_);
  } else if (setup.strategy.is_cut()) {
    whole_ = &own_outputs_.emplace(setup);
  } else {
    whole_ = &two_pass_.emplace(setup, sinks_).outputs();
  }
  if (whole_ != nullptr) checks_.know(*whole_);
  // Casts made before this step lead to the parameters' own accumulators, past the sinks.
  at::autocast::clear_cache();
}

void Executor::run(const Instruction& instruction, Rows rows) {
  ExecutionLog::note(instruction, rows);
  perform_and_time(instruction, rows);
  // Nothing comes back once gradients have been handed out.
  if (instruction.operation != Operation::hand_out) memory::Limit::check();
}

void Executor::perform_and_time(const Instruction& instruction, Rows rows) {
  if (!strategy_.offloads()) return perform(instruction, rows);
  using Clock = std::chrono::steady_clock;
  const offload::StoreStatistics before = resources_.store->statistics();
  const Clock::time_point begin = Clock::now();
  copied_bytes_ = 0;
  perform(instruction, rows);
  const bool timed = problem_.rehearses && !strategy_.is_cut();
  if (timed && !problem_.device.is_cpu())
    at::accelerator::synchronizeDevice(problem_.device.index());
  const double taken = std::chrono::duration<double>(Clock::now() - begin).count();
  const offload::StoreStatistics after = resources_.store->statistics();
  if (instruction.operation == Operation::record ||
      instruction.operation == Operation::whole_loss) {
    copied_bytes_ = after.moved_out - before.moved_out + after.moved_back - before.moved_back;
  }
  const int64_t samples = instruction.micro_batch < 0 ? problem_.batch_size() : rows.size();
  times_.add(instruction, samples, taken - (after.seconds_waited - before.seconds_waited),
             copied_bytes_);
}

void Executor::perform(const Instruction& instruction, Rows rows) {
  if (instruction.micro_batch >= 0 && rows.size() > 0) forwards_.note_rows(rows);
  const int64_t segment = instruction.segment;
  switch (instruction.operation) {
    case Operation::load:
      return forwards_.load(rows);
    case Operation::forward:
      return checks_.stream(rows);
    case Operation::loss:
      return loss(rows);
    case Operation::record:
      if (cut_pass_) return record_for_cuts(rows);
      return record(rows, /*retain=*/false);
    case Operation::retain:
      return record(rows, /*retain=*/true);
    case Operation::whole_loss:
      return whole_loss();
    case Operation::replay:
      return replay(rows);
    case Operation::seed:
      return cut_pass_ ? seed() : two_pass_->seed();
    case Operation::advance:
      return advance(rows, segment, /*retain=*/false);
    case Operation::advance_retained:
      return advance(rows, segment, /*retain=*/true);
    case Operation::combine:
      return cut_pass_->combine(segment);
    case Operation::resume:
      return resume(rows, segment);
    case Operation::combine_gradients:
      return cut_pass_->combine_gradients(segment);
    case Operation::restore:
    case Operation::prefetch:
      copied_bytes_ = fetch(rows, segment, instruction.back,
                            /*ahead=*/instruction.operation == Operation::prefetch);
      return;
    case Operation::start_offload:
      copied_bytes_ = leave(rows, segment);
      return;
    case Operation::finish_offload:
      copied_bytes_ = offload(rows, segment, instruction.back);
      return;
    case Operation::backward:
      return backward(rows, segment);
    case Operation::free:
      if (problem_.loss.coupled() != nullptr && strategy_.offloads()) {
        whole_->forget(rows);
      }
      return cut_pass_ ? release() : free();
    case Operation::penalty:
      return penalty();
    case Operation::hand_out:
      return hand_out();
  }
}

WholeOutputs* Executor::outputs_at(Rows rows, int64_t segment) {
  return whole_ != nullptr && is_last(rows, segment) ? whole_ : nullptr;
}

int64_t Executor::fetch(Rows rows, int64_t segment, bool back, bool ahead) {
  if (two_pass_) return two_pass_->fetch(rows, ahead);
  int64_t bytes = cut_pass_ ? cut_pass_->fetch(rows, segment, back, ahead) : 0;
  if (back && outputs_at(rows, segment) != nullptr) {
    bytes += outputs_at(rows, segment)->fetch(rows, ahead);
  }
  return bytes;
}

int64_t Executor::leave(Rows rows, int64_t segment) {
  if (two_pass_) return two_pass_->leave(rows);
  const int64_t bytes = cut_pass_ ? cut_pass_->leave(rows) : 0;
  WholeOutputs* outputs = outputs_at(rows, segment);
  return bytes + (outputs != nullptr ? outputs->leave(rows) : 0);
}

int64_t Executor::offload(Rows rows, int64_t segment, bool back) {
  if (two_pass_) return two_pass_->offload(rows);
  // A micro-batch whose segments follow each other is gone with the last of them.
  WholeOutputs* outputs = strategy_.per_micro_batch() ? nullptr : outputs_at(rows, segment);
  const int64_t bytes = cut_pass_ ? cut_pass_->offload(rows, segment, back) : 0;
  return bytes + (outputs != nullptr ? outputs->offload(rows) : 0);
}

void Executor::whole_loss() {
  in_whole_loss_ = true;
  coupled::RandomStreams* streams = cut_pass_ ? cut_pass_->streams() : nullptr;
  if (streams != nullptr) streams->settle();
  whole_->watch_attributes(forwards_.state());
  forwards_.buffers().begin_loss();
  const LossState::Scope keeping(loss_state_);
  const at::Tensor value = whole_->loss(sinks_);
  forwards_.buffers().end_loss();
  if (streams != nullptr) streams->take();
  in_whole_loss_ = false;
  checks_.read_by_loss();
  forwards_.begin_second_pass();
  total_.add(value);
}

void Executor::replay(Rows rows) {
  if (problem_.loss.external() == nullptr) {
    forwards_.load(rows);
    return two_pass_->again(rows, forwards_.inputs, [&] {
      return forwards_.uncounted([&] { return forwards_.call(rows); });
    });
  }
  if (problem_.interrupt) problem_.interrupt();
  // Gradients of the inputs arrive at the leaves that the graph began with.
  const Batch* of_graph = two_pass_->inputs_of_graph(rows);
  forwards_.inputs = of_graph != nullptr ? *of_graph : forwards_.load_inputs(rows);
  two_pass_->again(rows, forwards_.inputs,
                   [&] { return problem_.loss.external()->forward_again(forwards_.inputs); });
}

bool Executor::is_last(Rows rows, int64_t segment) const {
  return segment + 1 == (strategy_.checkpoints() ? segments(rows) : segments());
}

void Executor::load_for(Rows rows, int64_t segment) {
  if (problem_.interrupt) problem_.interrupt();
  if (cut_pass_->reads_inputs(rows, segment)) forwards_.inputs = forwards_.load_inputs(rows);
}

void Executor::advance(Rows rows, int64_t segment, bool retain) {
  load_for(rows, segment);
  Batch outputs = cut_pass_->advance(rows, forwards_.inputs, segment, retain);
  if (is_last(rows, segment) && problem_.loss.external() != nullptr) {
    problem_.loss.external()->take(rows, Batch(), std::exchange(outputs, Batch()));
  } else if (is_last(rows, segment)) {
    const Batch& seen = whole_->add(rows, outputs);
    outputs = Batch();  // its graph holds what may leave the device now
    if (problem_.on_micro_batch) {
      forwards_.load_targets(rows);
      problem_.on_micro_batch({rows.begin, rows.end, seen, forwards_.targets});
    }
  }
  release();
}

void Executor::resume(Rows rows, int64_t segment) {
  load_for(rows, segment);
  forwards_.outputs = cut_pass_->resume(rows, forwards_.inputs, segment);
  if (!is_last(rows, segment)) return;
  if (problem_.loss.external() != nullptr) {
    problem_.loss.external()->compare(rows, forwards_.outputs);
  } else if (whole_) {
    whole_->compare(rows, forwards_.outputs);
  } else {
    forwards_.load_targets(rows);
  }
}

void Executor::loss(Rows rows) {
  const LossState::Scope keeping(loss_state_);
  const at::Tensor& share = share_->compute(rows, forwards_.outputs, forwards_.targets);
  checks_.read_by(share);
  const at::NoGradGuard no_grad;
  total_.add(share);
  if (problem_.on_micro_batch) {
    problem_.on_micro_batch(
        {rows.begin, rows.end, without_graph(forwards_.outputs), forwards_.targets});
  }
  // The graph holds what backward needs of them.
  forwards_.outputs = Batch();
}

void Executor::backward(Rows rows, int64_t segment) {
  if (two_pass_ && problem_.loss.external() != nullptr) {
    two_pass_->backward(rows, forwards_.inputs.tensors());
    return problem_.loss.external()->collect(rows, forwards_.inputs);
  }
  if (two_pass_) return two_pass_->backward(rows);
  if (!cut_pass_) return share_->differentiate();
  if (!is_last(rows, segment) || problem_.loss.external() != nullptr || whole_) {
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> gradients;
    const Batch outputs = std::exchange(forwards_.outputs, Batch());
    for (size_t i = 0; i < outputs.leaves().size(); ++i) {
      const at::Tensor& output = outputs.leaves()[i].tensor;
      if (!output.defined() || !output.requires_grad()) continue;
      at::Tensor gradient = gradient_of(rows, i, output);
      if (!gradient.defined()) continue;  // the loss ignores this output
      roots.push_back(output);
      gradients.push_back(std::move(gradient));
    }
    cut_pass_->backward(rows, segment, std::move(roots), std::move(gradients));
    if (problem_.loss.external() != nullptr)
      problem_.loss.external()->collect(rows, forwards_.inputs);
    return;
  }
  share_->differentiate(cut_pass_->leaves());
  cut_pass_->collect(rows, segment);
}

at::Tensor Executor::gradient_of(Rows rows, size_t leaf, const at::Tensor& output) {
  if (!seeds_.empty()) return seeds_[leaf];
  if (problem_.loss.external() != nullptr)
    return problem_.loss.external()->gradient(rows, leaf, output);
  return whole_->gradient(rows, leaf, output.device());
}

void Executor::free() {
  if (two_pass_) two_pass_->free();
  release();
  if (going_back_) return;  // whoever has the loss puts back what forward found
  forwards_.end_micro_batch();
}

void Executor::seed() {
  seeds_ = stand_in_gradients(forwards_.outputs);
}

void Executor::release() {
  if (share_) share_->free();
  seeds_.clear();
  if (cut_pass_) cut_pass_->free();
  forwards_.release();
  sinks_.forget_dead_leaves();
}

void Executor::penalty() {
  const at::Tensor term = share_->penalty();
  if (term.defined()) total_.add(term);
}

void Executor::hand_out() {
  checks_.look();
  forwards_.commit();
  // Whatever can fail comes first: a hand-out cannot be taken back.
  checks_.rethrow();
  finish();
  forwards_.few().forget();
  // Hooks may draw too.
  if (cut_pass_ && cut_pass_->streams() != nullptr) cut_pass_->streams()->settle();
  sinks_.hand_out();
}

void Executor::finish() {
  final_loss_ = total_.get();
  if (cut_pass_) cut_pass_->confirm_replays();
  if (two_pass_) {
    two_pass_->check();
    if (problem_.keep_outputs) final_outputs_ = whole_->all();
    return;
  }
  if (whole_) {
    if (whole_->differ()) {
      const std::string part = strategy_.per_micro_batch()
                                   ? "forward"
                                   : "the part of forward after the last op of the whole batch";
      throw Unsupported(part +
                        " gave other outputs when it was replayed, so its gradient would not "
                        "belong to the loss; a kernel in it is not deterministic");
    }
    if (problem_.keep_outputs) final_outputs_ = whole_->all();
    return;
  }
  if (problem_.keep_outputs) final_outputs_ = share_->take_outputs();
}

void Executor::finish_forward() {
  forwards_.commit();
  if (cut_pass_ && cut_pass_->streams() != nullptr) cut_pass_->streams()->settle();
  checks_.rethrow();
  sinks_.uninstall();
  forwards_.watch().renormed()->commit();
  forwards_.watch().close();
}

void Executor::end_forward() {
  forwards_.let_go();
  checks_.let_go();
}

void Executor::abandon() {
  if (two_pass_) two_pass_->free();
  release();
}

void Executor::begin_backward(bool keep) {
  going_back_ = true;
  sinks_.install();
  if (cut_pass_) cut_pass_->begin_backward(keep);
  if (two_pass_) two_pass_->begin_second_pass();
}

void Executor::roll_back() {
  const Unwatched unwatched;
  sinks_.uninstall();
  // What the loss found comes first: forwards had been at the model's own state before.
  std::exception_ptr lost;
  try {
    loss_state_.roll_back();
  } catch (...) {
    lost = std::current_exception();
  }
  forwards_.roll_back();
  if (lost) std::rethrow_exception(lost);
}

at::Tensor Executor::loss() const {
  return final_loss_.defined() ? final_loss_ : total_.get();
}

std::optional<std::string> Executor::collective() const {
  return whole_ ? whole_->collective() : std::nullopt;
}

std::optional<std::string> Executor::opaque() const {
  return two_pass_ ? two_pass_->opaque() : std::nullopt;
}

std::optional<Batch> Executor::take_outputs() {
  if (problem_.keep_outputs && !final_outputs_) finish();
  return std::exchange(final_outputs_, std::nullopt);
}

}  // namespace infinitybatch
