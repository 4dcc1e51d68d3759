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
      share_(
          setup.problem.loss.separable() == nullptr
              ? nullptr
              : std::make_unique<SeparableShare>(setup.problem, *setup.resources.findings, sinks_)),
      whole_(setup.problem.loss.coupled() == nullptr ? nullptr
                                                     : std::make_unique<WholeOutputs>(setup)),
      pass_(setup, sinks_, forwards_.buffers(), share_.get(), whole_.get()),
      total_(setup.problem.device) {
  if (whole_) checks_.know(*whole_);
  forwards_.state().runs().tell_remade(
      [this](const at::Tensor& made, const at::Tensor& stands) { sinks_.let_stand(made, stands); });
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
      if (strategy_.is_cut()) return record_for_cuts(rows);
      return record(rows, /*retain=*/false);
    case Operation::retain:
      return record(rows, /*retain=*/true);
    case Operation::whole_loss:
      return whole_loss();
    case Operation::replay:
      return replay(rows);
    case Operation::seed:
      return pass_.seed(forwards_.outputs);
    case Operation::advance:
    case Operation::advance_retained:
      return advance(rows, instruction);
    case Operation::recompute:
      load_for(rows, segment);
      pass_.recompute(rows, forwards_.inputs, segment, instruction.leaves);
      return release();
    case Operation::combine:
      return pass_.combine(segment);
    case Operation::resume:
      return resume(rows, segment);
    case Operation::combine_gradients:
      return pass_.combine_gradients(segment);
    case Operation::restore:
    case Operation::prefetch:
      copied_bytes_ = pass_.restore(rows, segment, instruction.back,
                                    /*ahead=*/instruction.operation == Operation::prefetch);
      return;
    case Operation::start_offload:
      copied_bytes_ = pass_.start_offload(rows, segment);
      return;
    case Operation::finish_offload:
      copied_bytes_ = pass_.finish_offload(rows, segment, instruction.back);
      return;
    case Operation::backward:
      return backward(rows, segment);
    case Operation::free:
      if (problem_.loss.coupled() != nullptr && strategy_.offloads()) {
        whole_->forget(rows);
      }
      return strategy_.is_cut() ? release() : free();
    case Operation::penalty:
      return penalty();
    case Operation::hand_out:
      return hand_out();
  }
}

void Executor::each_check(void (Check::*moment)()) {
  for (Check* check : forwards_.checks()) (check->*moment)();
  (checks_.*moment)();
}

void Executor::whole_loss() {
  in_whole_loss_ = true;
  coupled::RandomStreams* streams = pass_.streams();
  if (streams != nullptr) streams->settle();
  whole_->watch_attributes(forwards_.state());
  forwards_.buffers().begin_loss();
  const LossState::Scope keeping(&loss_state_);
  const at::Tensor value = whole_->loss(sinks_);
  forwards_.buffers().end_loss();
  if (streams != nullptr) streams->take();
  in_whole_loss_ = false;
  checks_.read_by_loss();
  each_check(&Check::begin_second_pass);
  total_.add(value);
}

void Executor::replay(Rows rows) {
  ExternalLoss* const loss = problem_.loss.external();
  if (loss == nullptr) {
    forwards_.load(rows);
    forwards_.outputs = pass_.resume(rows, forwards_.inputs, [&] {
      return forwards_.uncounted([&] { return forwards_.call(rows); });
    });
    return;
  }
  if (problem_.interrupt) problem_.interrupt();
  // Gradients of the inputs arrive at the leaves that the graph began with.
  const Batch* of_graph = pass_.inputs_of_graph(rows);
  forwards_.inputs = of_graph != nullptr ? *of_graph : forwards_.load_inputs(rows);
  forwards_.outputs =
      pass_.resume(rows, forwards_.inputs, [&] { return loss->forward_again(forwards_.inputs); });
}

void Executor::load_for(Rows rows, int64_t segment) {
  if (problem_.interrupt) problem_.interrupt();
  if (pass_.reads_inputs(rows, segment)) forwards_.inputs = forwards_.load_inputs(rows);
}

void Executor::advance(Rows rows, const Instruction& instruction) {
  const int64_t segment = instruction.segment;
  load_for(rows, segment);
  const bool retain = instruction.operation == Operation::advance_retained;
  Batch outputs = pass_.advance(rows, forwards_.inputs, segment, retain, instruction.leaves);
  if (pass_.is_last(rows, segment) && problem_.loss.external() != nullptr) {
    problem_.loss.external()->take(rows, Batch(), std::exchange(outputs, Batch()));
  } else if (pass_.is_last(rows, segment)) {
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
  forwards_.outputs = pass_.resume(rows, forwards_.inputs, segment);
  if (share_ && pass_.is_last(rows, segment)) forwards_.load_targets(rows);
}

void Executor::loss(Rows rows) {
  const LossState::Scope keeping(&loss_state_);
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
  pass_.backward(rows, segment, std::exchange(forwards_.outputs, Batch()));
  if (ExternalLoss* loss = problem_.loss.external()) loss->collect(rows, forwards_.inputs);
}

void Executor::free() {
  release();
  if (going_back_) return;  // whoever has the loss puts back what forward found
  each_check(&Check::see_micro_batch);
  each_check(&Check::end_micro_batch);
}

void Executor::release() {
  if (share_) share_->free();
  pass_.free();
  forwards_.release();
  sinks_.forget_dead_leaves();
}

void Executor::penalty() {
  sinks_.end_micro_batches();
  const at::Tensor term = share_->penalty();
  if (term.defined()) total_.add(term);
}

void Executor::hand_out() {
  forwards_.learn_numbers();
  each_check(&Check::look);
  forwards_.commit();
  // Whatever can fail comes first: a hand-out cannot be taken back.
  checks_.rethrow();
  finish();
  forwards_.few().forget();
  // Hooks may draw too.
  if (pass_.streams() != nullptr) pass_.streams()->settle();
  sinks_.hand_out();
}

void Executor::finish() {
  final_loss_ = total_.get();
  pass_.check();
  if (problem_.keep_outputs) final_outputs_ = whole_ ? whole_->all() : share_->take_outputs();
}

void Executor::finish_forward() {
  forwards_.commit();
  if (pass_.streams() != nullptr) pass_.streams()->settle();
  checks_.rethrow();
  sinks_.uninstall();
  forwards_.watch().renormed()->commit();
  forwards_.watch().close();
}

void Executor::end_forward() {
  each_check(&Check::let_go);
}

void Executor::abandon() {
  release();
}

void Executor::begin_backward(bool keep, bool repeatable) {
  going_back_ = true;
  sinks_.install();
  pass_.begin_backward(keep, repeatable);
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
  each_check(&Check::roll_back);
  if (lost) std::rethrow_exception(lost);
}

at::Tensor Executor::loss() const {
  return final_loss_.defined() ? final_loss_ : total_.get();
}

std::optional<Batch> Executor::take_outputs() {
  if (problem_.keep_outputs && !final_outputs_) finish();
  return std::exchange(final_outputs_, std::nullopt);
}

}  // namespace infinitybatch
