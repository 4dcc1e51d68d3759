#include "execute/repeatable_forward.hpp"

#include "core/foreign_exception.hpp"
#include "core/unwatched.hpp"
#include "tape/draws.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <exception>
#include <utility>

namespace infinitybatch {
namespace {

const char* why_no_tapes(const Strategy& strategy) {
  return strategy.second_forward == Strategy::SecondForward::rerun_after_mismatch
             ? "an earlier replay gave other outputs than its recording"
             : "use_tapes=false was given";
}

}  // namespace

Batch RepeatableForward::first(const Batch& inputs, bool keep, bool read,
                               const std::function<Batch()>& forward) {
  const Problem& problem = model_.problem;
  // Nobody goes back without a graph.
  again_ = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  memory_.reset();
  if (keep && model_.strategy.offloads_graphs()) memory_.emplace().know(inputs);
  const auto run = [&] { return memory_ ? memory_->watch(forward) : forward(); };
  if (again_) random_ = RngSnapshot::capture(model_.devices);
  if (again_ && !problem.exact_coupling) {
    buffers_ = std::make_shared<BufferValues>(problem.buffers);
  }
  Batch outputs;
  const bool graph_alone = keep && !problem.goes_back_again && buffers_of(problem).empty();
  const bool needs_tape = again_ && model_.strategy.replays() && !graph_alone;
  if (!needs_tape && !read) {
    outputs = run();
    forget_recording();
  } else {
    tape::Recorder recorder(inputs, model_.buffers, model_.devices);
    recorder.leave_parameters(model_.parameters);
    outputs = recorder.run(run);
    tape_ = recorder.finish(outputs);
    tape::share_with_last(tape_);
    recorded_ = true;
    if (tape_.refusal && needs_tape) {
      throw Unsupported(*tape_.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  // A tape has what it needs of both, unless it turns out to give other outputs; a graph that is
  // kept needs neither.
  if (recorded_ && replays() && !problem.goes_back_again) {
    random_ = RngSnapshot();
    buffers_.reset();
  }
  return outputs;
}

void RepeatableForward::forget_recording() {
  if (again_ && model_.strategy.replays()) return;
  if (std::exchange(recorded_, false)) tape_ = tape::Tape();
  if (again_) run_again(why_no_tapes(model_.strategy));
}

void RepeatableForward::keep_graph(Batch outputs, Batch inputs) {
  graph_ = std::move(outputs);
  inputs_ = std::move(inputs);
}

void RepeatableForward::drop_spoilt_graph() {
  drop_graph();
  if (!recorded_ && again_) run_again("forward writes into what its graph keeps");
}

void RepeatableForward::drop_graph() {
  graph_.reset();
  memory_.reset();
  inputs_ = Batch();
}

Batch RepeatableForward::take_graph() {
  restore_graph(/*ahead=*/false);
  Batch outputs = std::move(*graph_);
  drop_graph();
  return outputs;
}

Batch RepeatableForward::second(const Batch& inputs, const std::function<Batch()>& forward) {
  Batch outputs = replays() ? tape::replay(tape_, inputs) : run_second(forward);
  if (!model_.problem.goes_back_again) {
    buffers_.reset();
    tape_ = tape::Tape();
  }
  return outputs;
}

Batch RepeatableForward::run_second(const std::function<Batch()>& forward) const {
  const RngSnapshot now = RngSnapshot::capture(model_.devices);
  const tape::GeneratorsGuard generators(tape_);  // the user's own too
  random_.restore();
  tape::set_states(tape_.initial);
  // Past the version counter: where forward doesn't write them nothing changes, and graphs that
  // are kept stay valid.
  if (buffers_) buffers_->restore();
  Batch outputs;
  try {
    outputs = forward();
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    const Unwatched unwatched;
    now.restore();
    throw;
  }
  now.restore();
  return outputs;
}

int64_t RepeatableForward::start_offload(const Batch& seen) {
  return memory_->start_leaving(*model_.resources.store, memory_of(seen));
}

int64_t RepeatableForward::finish_offload(Batch& seen) {
  if (!model_.problem.goes_back_again) forget_second_forward();
  return offload_graph(*memory_, *model_.resources.store, *graph_, seen);
}

void RepeatableForward::forget_second_forward() {
  tape_ = {};
  random_ = {};
  buffers_.reset();
}

}  // namespace infinitybatch
