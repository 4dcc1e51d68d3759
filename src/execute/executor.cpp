#include "execute/executor.hpp"

#include "core/batch_form.hpp"
#include "core/unwatched.hpp"
#include "execute/execution_log.hpp"
#include "execute/outside_loss.hpp"
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

Executor::Executor(const Job& job)
    : job_(job),
      // Graphs that are not kept for a loss outside may be anybody's; without gradients there are
      // none.
      sinks_(at::GradMode::is_enabled() ? job.parameters : std::vector<NamedParameter>(),
             job.nested, /*installed=*/job.cut || job.outside == nullptr),
      forwards_(job, [this] { release(); }),
      checks_(job, forwards_),
      total_(job.device) {
  if (job.cut) cut_pass_.emplace(job, sinks_, forwards_.buffers());
  if (job.outside != nullptr && job.cut) {
    // computes no loss here
  } else if (job.coupled == nullptr) {
    share_.emplace(job, sinks_);
  } else if (job.cut) {
    whole_ = &own_outputs_.emplace(job);
  } else {
    whole_ = &two_pass_.emplace(job, sinks_).outputs();
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
  if (job_.store == nullptr) return perform(instruction, rows);
  using Clock = std::chrono::steady_clock;
  const offload::StoreStatistics before = job_.store->statistics();
  const Clock::time_point begin = Clock::now();
  copied_bytes_ = 0;
  perform(instruction, rows);
  if (job_.waits && !job_.device.is_cpu()) at::accelerator::synchronizeDevice(job_.device.index());
  const double taken = std::chrono::duration<double>(Clock::now() - begin).count();
  const offload::StoreStatistics after = job_.store->statistics();
  if (instruction.operation == Operation::record ||
      instruction.operation == Operation::whole_loss) {
    copied_bytes_ = after.moved_out - before.moved_out + after.moved_back - before.moved_back;
  }
  const int64_t samples = instruction.micro_batch < 0 ? job_.batch_size() : rows.size();
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
      copied_bytes_ =
          fetch(rows, segment, /*back=*/false, instruction.operation == Operation::prefetch);
      return;
    case Operation::restore_back:
    case Operation::prefetch_back:
      copied_bytes_ =
          fetch(rows, segment, /*back=*/true, instruction.operation == Operation::prefetch_back);
      return;
    case Operation::start_offload:
    case Operation::start_offload_back:
      copied_bytes_ = leave(rows, segment);
      return;
    case Operation::finish_offload:
    case Operation::finish_offload_back:
      copied_bytes_ =
          offload(rows, segment, instruction.operation == Operation::finish_offload_back);
      return;
    case Operation::backward:
      return backward(rows, segment);
    case Operation::free:
      if (job_.coupled != nullptr && job_.outside == nullptr && job_.store != nullptr) {
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
  WholeOutputs* outputs = job_.alone ? nullptr : outputs_at(rows, segment);
  const int64_t bytes = cut_pass_ ? cut_pass_->offload(rows, segment, back) : 0;
  return bytes + (outputs != nullptr ? outputs->offload(rows) : 0);
}

void Executor::record(Rows rows, bool retain) {
  forwards_.load(rows);
  const bool outside = job_.outside != nullptr;
  const bool first_of_several =
      forwards_.first().begin == rows.begin && rows.size() < job_.batch_size();
  const bool asked = job_.learns_output_law(rows) || job_.examines(rows) || checks_.asks(rows);
  const bool tells = (job_.use_tapes && asked) || (outside && first_of_several);
  const auto call = [&] {
    if (!outside || !retain) return forwards_.call(rows);
    struct Installed {
      explicit Installed(autograd::GradientSinks& sinks) : sinks(sinks) { sinks.install(); }
      ~Installed() { sinks.uninstall(); }
      autograd::GradientSinks& sinks;
    } const installed(sinks_);
    return forwards_.call(rows);
  };
  const Batch& seen = two_pass_->first(rows, forwards_.inputs, retain, tells, call);
  if (outside && forwards_.saw_across_batch()) {
    // The tape has its number alone, which is forgotten with this pass.
    two_pass_->run_again(rows, "a function of across_batch");
  }
  if (forwards_.wrote_inputs() && outside) {
    // They are rows of one tensor: for torch what one micro-batch writes is written in all.
    two_pass_->drop_graphs();
  } else if (forwards_.wrote_inputs() && two_pass_->keeps_graph_before(rows)) {
    throw Unsupported(
        "forward changes its inputs in place, which are rows of one tensor: for torch that spoils "
        "the graphs of other micro-batches that are kept; write that out of place, as in x = x - "
        "mean, or keep no graphs (retained_micro_batches=0). The rows that it ran on are changed");
  }
  if (job_.on_micro_batch) job_.on_micro_batch({rows.begin, rows.end, seen, forwards_.targets});
  const bool learns = job_.learns_output_law(rows);
  const Batch inputs = learns ? without_tensors(forwards_.inputs) : Batch();
  checks_.look_at(rows, forwards_.inputs, two_pass_->tape(rows), two_pass_->given());
  free();
  forwards_.learn_numbers();
  if (learns) checks_.learn_outputs(rows, inputs, seen, two_pass_->tape(rows));
  two_pass_->has_told(rows);
  // Buffers that were restored under a graph could belong to what it has saved.
  const bool restored = forwards_.restores();
  if (restored && outside) two_pass_->drop_graphs();
  if (restored && retain) two_pass_->drop_graph(rows);
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
  if (job_.outside == nullptr) {
    forwards_.load(rows);
    return two_pass_->again(rows, forwards_.inputs, [&] {
      return forwards_.uncounted([&] { return forwards_.call(rows); });
    });
  }
  if (job_.interrupt) job_.interrupt();
  // Gradients of the inputs arrive at the leaves that the graph began with.
  const Batch* of_graph = two_pass_->inputs_of_graph(rows);
  forwards_.inputs = of_graph != nullptr ? *of_graph : forwards_.load_inputs(rows);
  two_pass_->again(rows, forwards_.inputs,
                   [&] { return job_.outside->forward_again(forwards_.inputs); });
}

bool Executor::is_last(Rows rows, int64_t segment) const {
  return segment + 1 == (job_.checkpoints != nullptr ? segments(rows) : segments());
}

void Executor::record_for_cuts(Rows rows) {
  if (job_.interrupt) job_.interrupt();
  // A recording that is used again tells nobody how outputs follow the samples.
  if (!job_.alone && !job_.learns_output_law(rows) && cut_pass_->reuse(rows)) return;
  forwards_.load(rows);
  const auto call = [&](Rows at_work) {
    forwards_.run(at_work);
    if (forwards_.wrote_inputs()) {
      throw Unsupported(
          "forward changes its inputs in place, and has to run on them again (for a layer that "
          "sees the whole batch, or because one sample's activations do not fit into the budget); "
          "write that out of place, as in x = x - mean. The rows that it ran on are changed");
    }
    if (job_.alone) forwards_.check_coupling(rows);
    return std::exchange(forwards_.outputs, Batch());
  };
  if (job_.alone) {
    Batch given = cut_pass_->checkpoint(rows, forwards_.inputs, [&] { return call(rows); });
    if (whole_) {
      given = whole_->add(rows, given);
      if (job_.on_micro_batch)
        job_.on_micro_batch({rows.begin, rows.end, given, forwards_.targets});
    }
    const Batch inputs = without_tensors(forwards_.inputs);
    checks_.look_at(rows, forwards_.inputs, cut_pass_->tape(rows), given);
    free();
    forwards_.learn_numbers();
    if (job_.learns_output_law(rows))
      checks_.learn_outputs(rows, inputs, given, cut_pass_->tape(rows));
    given = Batch();
    // Until a coupled loss is known the other micro-batches need the room.
    if (whole_ && job_.store != nullptr) {
      cut_pass_->offload(rows);
      whole_->offload(rows);
    }
    // Buffers that were restored under a graph could belong to what it has saved.
    if (forwards_.buffers().written()) cut_pass_->drop_graph(rows);
    return;
  }
  const Batch inputs = forwards_.inputs;
  const Batch targets = forwards_.targets;
  const auto elsewhere = [&](Rows others, const CutPass::Run& run) {
    forwards_.load(others);
    run(forwards_.inputs, [&] { return forwards_.uncounted([&] { return call(others); }); });
    forwards_.inputs = inputs;
    forwards_.targets = targets;
  };
  const auto again = [&](bool as_first) {
    return forwards_.uncounted([&] { return call(rows); }, as_first);
  };
  const auto depends_on_state = [&] {
    forwards_.learn_numbers(/*any=*/true);
    forwards_.inputs = inputs;
    forwards_.targets = targets;
    return forwards_.state().runs().counts();
  };
  const auto once = [&, recorded = false]() mutable {
    if (std::exchange(recorded, true)) forwards_.state().runs().count_anew();
    return call(rows);
  };
  const CutPass::Forward forward{once, again, depends_on_state};
  const Batch given = cut_pass_->record(rows, inputs, forwards_.watch(), forward, elsewhere);
  checks_.look_at(rows, inputs, cut_pass_->tape(rows), given);
  free();
  forwards_.learn_numbers();
  if (job_.learns_output_law(rows))
    checks_.learn_outputs(rows, inputs, given, cut_pass_->tape(rows));
}

void Executor::load_for(Rows rows, int64_t segment) {
  if (job_.interrupt) job_.interrupt();
  if (cut_pass_->reads_inputs(rows, segment)) forwards_.inputs = forwards_.load_inputs(rows);
}

void Executor::advance(Rows rows, int64_t segment, bool retain) {
  load_for(rows, segment);
  Batch outputs = cut_pass_->advance(rows, forwards_.inputs, segment, retain);
  if (is_last(rows, segment) && job_.outside != nullptr) {
    job_.outside->take(rows, Batch(), std::exchange(outputs, Batch()));
  } else if (is_last(rows, segment)) {
    const Batch& seen = whole_->add(rows, outputs);
    outputs = Batch();  // its graph holds what may leave the device now
    if (job_.on_micro_batch) {
      forwards_.load_targets(rows);
      job_.on_micro_batch({rows.begin, rows.end, seen, forwards_.targets});
    }
  }
  release();
}

void Executor::resume(Rows rows, int64_t segment) {
  load_for(rows, segment);
  forwards_.outputs = cut_pass_->resume(rows, forwards_.inputs, segment);
  if (!is_last(rows, segment)) return;
  if (job_.outside != nullptr) {
    job_.outside->compare(rows, forwards_.outputs);
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
  if (job_.on_micro_batch) {
    job_.on_micro_batch(
        {rows.begin, rows.end, without_graph(forwards_.outputs), forwards_.targets});
  }
  // The graph holds what backward needs of them.
  forwards_.outputs = Batch();
}

void Executor::backward(Rows rows, int64_t segment) {
  if (two_pass_ && job_.outside != nullptr) {
    two_pass_->backward(rows, forwards_.inputs.tensors());
    return job_.outside->collect(rows, forwards_.inputs);
  }
  if (two_pass_) return two_pass_->backward(rows);
  if (!cut_pass_) {
    sinks_.next_micro_batch();
    return share_->differentiate();
  }
  if (!is_last(rows, segment) || job_.outside != nullptr || whole_) {
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
    if (job_.outside != nullptr) job_.outside->collect(rows, forwards_.inputs);
    return;
  }
  share_->differentiate(cut_pass_->leaves());
  cut_pass_->collect(rows, segment);
}

at::Tensor Executor::gradient_of(Rows rows, size_t leaf, const at::Tensor& output) {
  if (!seeds_.empty()) return seeds_[leaf];
  if (job_.outside != nullptr) return job_.outside->gradient(rows, leaf, output);
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
  sinks_.end_micro_batches();
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
    if (job_.keep_outputs) final_outputs_ = whole_->all();
    return;
  }
  if (whole_) {
    if (whole_->differ()) {
      const std::string part =
          job_.alone ? "forward" : "the part of forward after the last op of the whole batch";
      throw Unsupported(part +
                        " gave other outputs when it was replayed, so its gradient would not "
                        "belong to the loss; a kernel in it is not deterministic");
    }
    if (job_.keep_outputs) final_outputs_ = whole_->all();
    return;
  }
  if (job_.keep_outputs) final_outputs_ = share_->take_outputs();
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
  if (job_.keep_outputs && !final_outputs_) finish();
  return std::exchange(final_outputs_, std::nullopt);
}

}  // namespace infinitybatch
