// The part of Pass that knows micro-batches whose tape is not cut.
#include "execute/pass.hpp"

#include "autograd/engine.hpp"
#include "core/batch_form.hpp"
#include "core/foreign_exception.hpp"
#include "core/unwatched.hpp"
#include "execute/external_loss.hpp"
#include "tape/draws.hpp"
#include "tape/mismatch.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace infinitybatch {

const char* Pass::why_no_tapes() const {
  return strategy_.second_forward == Strategy::SecondForward::rerun_after_mismatch
             ? "an earlier replay gave other outputs than its recording"
             : "use_tapes=false was given";
}

const Batch& Pass::first(Rows rows, const Batch& inputs, bool keep, Batch* told,
                         const std::function<Batch()>& forward) {
  Part& part = parts_[rows.begin];
  part.rows = rows;
  Whole& whole = part.whole;
  // Nobody goes back without a graph.
  whole.again = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  whole.memory.reset();
  if (keep && strategy_.offloads_graphs()) whole.memory.emplace().know(inputs);
  const auto run = [&] { return whole.memory ? whole.memory->watch(forward) : forward(); };
  if (whole.again) whole.random = RngSnapshot::capture(devices_);
  if (whole.again && !problem_.exact_coupling) {
    whole.buffers = std::make_shared<BufferValues>(problem_.buffers);
  }
  Batch outputs;
  const bool graph_alone = keep && !problem_.goes_back_again && problem_.buffers.empty();
  const bool needs_tape = whole.again && strategy_.replays() && !graph_alone;
  if (!needs_tape && told == nullptr) {
    outputs = run();
    forget_recording(part);
  } else {
    tape::Recorder recorder(inputs, held_buffers_, devices_);
    outputs = recorder.run(run);
    whole.tape = recorder.finish(outputs);
    whole.recorded = true;
    if (whole.tape.refusal && needs_tape) {
      throw Unsupported(*whole.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  // A tape has what it needs of both, unless it turns out to give other outputs; a graph that is
  // kept needs neither.
  if (replays(part) && !problem_.goes_back_again) {
    whole.random = RngSnapshot();
    whole.buffers.reset();
  }
  if (told != nullptr) *told = without_graph(outputs);
  if (ExternalLoss* loss = problem_.loss.external()) {
    outputs = loss->take(rows, inputs, std::move(outputs));
    if (keep) whole.inputs = inputs;
  } else {
    whole_->add(rows, outputs);
  }
  if (keep) part.retained[kWhole].outputs = std::move(outputs);
  return seen(rows);
}

void Pass::run_again(Rows rows, std::string reason) {
  tape::Tape& tape = parts_.at(rows.begin).whole.tape;
  if (!tape.opaque) tape.opaque = std::move(reason);
}

void Pass::forget_recording(Part& part) const {
  Whole& whole = part.whole;
  if (whole.again && strategy_.replays()) return;
  if (std::exchange(whole.recorded, false)) whole.tape = tape::Tape();
  if (whole.again && !whole.tape.opaque) whole.tape.opaque = why_no_tapes();
}

std::optional<std::string> Pass::will_run_again() const {
  for (const auto& [begin, part] : parts_) {
    if (part.whole.tape.opaque) return part.whole.tape.opaque;
  }
  return std::nullopt;
}

bool Pass::keeps_graph_before(Rows rows) const {
  return std::any_of(parts_.begin(), parts_.lower_bound(rows.begin),
                     [](const auto& part) { return part.second.keeps_whole_graph(); });
}

void Pass::drop_graph(Rows rows) {
  Part& part = parts_.at(rows.begin);
  part.retained.clear();
  part.whole.memory.reset();
  part.whole.inputs = Batch();
}

bool Pass::drop_graphs() {
  if (kept_graphs() == 0) return false;
  for (const auto& [begin, part] : parts_) drop_graph(part.rows);
  return true;
}

int64_t Pass::kept_graphs() const {
  return std::count_if(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part.second.keeps_whole_graph(); });
}

GraphBytes Pass::kept_graph_bytes() const {
  GraphBytes sum;
  for (const auto& [begin, part] : parts_) {
    if (!part.keeps_whole_graph() || !part.whole.memory) continue;
    const GraphBytes bytes = part.whole.memory->bytes();
    sum.offloaded += bytes.offloaded;
    sum.stayed += bytes.stayed;
  }
  return sum;
}

const Batch* Pass::inputs_of_graph(Rows rows) const {
  const Part& part = parts_.at(rows.begin);
  return part.keeps_whole_graph() ? &part.whole.inputs : nullptr;
}

Batch& Pass::seen(Rows rows) {
  ExternalLoss* loss = problem_.loss.external();
  return loss != nullptr ? loss->taken(rows) : whole_->of(rows);
}

int64_t Pass::offload_graph(Part& part) {
  if (!problem_.goes_back_again) part.whole.forget();  // no other forward follows
  GraphMemory& memory = *part.whole.memory;
  const int64_t bytes = infinitybatch::offload_graph(
      memory, *resources_.store, part.retained.at(kWhole).outputs, seen(part.rows));
  if (whole_ != nullptr) whole_->compare_none(part.rows);
  graph_bytes_.offloaded += memory.bytes().offloaded;
  graph_bytes_.stayed += memory.bytes().stayed;
  return bytes;
}

Batch Pass::resume(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  Part& part = parts_.at(rows.begin);
  Whole& whole = part.whole;
  if (problem_.loss.external() != nullptr) input_leaves_ = inputs.tensors();
  if (part.keeps_whole_graph()) {
    if (whole.memory) whole.memory->fetch(/*ahead=*/false);
    whole.memory.reset();
    Batch outputs = std::move(part.retained.at(kWhole).outputs);
    part.retained.clear();
    whole.inputs = Batch();
    return outputs;
  }
  Batch outputs;
  if (replays(part)) {
    outputs = tape::replay(whole.tape, inputs);
    replayed_ = true;
  } else {
    opaque_ = whole.tape.opaque;
    const RngSnapshot now = RngSnapshot::capture(devices_);
    const tape::GeneratorsGuard generators(whole.tape);  // the user's own too
    whole.random.restore();
    tape::set_states(whole.tape.initial);
    // Past the version counter: where forward doesn't write them nothing changes, and graphs that
    // are kept stay valid.
    if (whole.buffers) whole.buffers->restore();
    try {
      outputs = forward();
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      const Unwatched unwatched;
      now.restore();
      throw;
    }
    now.restore();
  }
  if (!problem_.goes_back_again) {
    whole.buffers.reset();
    whole.tape = tape::Tape();
  }
  compare(rows, outputs);
  return outputs;
}

}  // namespace infinitybatch
