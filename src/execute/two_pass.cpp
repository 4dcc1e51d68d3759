#include "execute/two_pass.hpp"

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

TwoPass::TwoPass(const Setup& setup, autograd::GradientSinks& sinks)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      sinks_(sinks),
      buffers_(buffers_of(setup.problem)),
      devices_(devices_of(setup.problem)),
      outputs_(setup) {}

const char* TwoPass::why_no_tapes() const {
  return strategy_.second_forward == Strategy::SecondForward::rerun_after_mismatch
             ? "an earlier replay gave other outputs than its recording"
             : "use_tapes=false was given";
}

const Batch& TwoPass::first(Rows rows, const Batch& inputs, bool retain, bool tells,
                            const std::function<Batch()>& forward) {
  Part& part = parts_[rows.begin];
  // Nobody goes back without a graph.
  part.again = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  part.memory.reset();
  if (retain && strategy_.offloads_graphs()) part.memory.emplace().know(inputs);
  const auto run = [&] { return part.memory ? part.memory->watch(forward) : forward(); };
  part.rows = rows;
  if (part.again) part.random = RngSnapshot::capture(devices_);
  if (part.again && !problem_.exact_coupling) {
    part.buffers = std::make_shared<BufferValues>(problem_.buffers);
  }
  Batch outputs;
  const bool graph_alone = retain && !problem_.goes_back_again && problem_.buffers.empty();
  const bool needs_tape = part.again && strategy_.replays() && !graph_alone;
  if (!needs_tape && !tells) {
    outputs = run();
    forget_recording(part);
  } else {
    tape::Recorder recorder(inputs, buffers_, devices_);
    outputs = recorder.run(run);
    part.tape = recorder.finish(outputs);
    part.recorded = true;
    if (part.tape.refusal && needs_tape) {
      throw Unsupported(*part.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  // A tape has what it needs of both, unless it turns out to give other outputs; a graph that is
  // kept needs neither.
  if (replays(part) && !problem_.goes_back_again) {
    part.random = RngSnapshot();
    part.buffers.reset();
  }
  if (tells) given_ = without_graph(outputs);
  if (problem_.loss.external() != nullptr) {
    outputs = problem_.loss.external()->take(rows, inputs, std::move(outputs));
    if (retain) part.inputs = inputs;
  }
  const Batch& seen = problem_.loss.external() ? problem_.loss.external()->taken(rows)
                                               : outputs_.add(rows, outputs);
  if (retain) part.graph = std::move(outputs);
  return seen;
}

void TwoPass::forget_recording(Part& part) const {
  if (part.again && strategy_.replays()) return;
  if (std::exchange(part.recorded, false)) part.tape = tape::Tape();
  if (part.again && !part.tape.opaque) part.tape.opaque = why_no_tapes();
}

std::optional<std::string> TwoPass::will_run_again() const {
  for (const auto& [begin, part] : parts_) {
    if (part.tape.opaque) return part.tape.opaque;
  }
  return std::nullopt;
}

bool TwoPass::keeps_graph_before(Rows rows) const {
  return std::any_of(parts_.begin(), parts_.lower_bound(rows.begin),
                     [](const auto& part) { return part.second.graph.has_value(); });
}

void TwoPass::drop_graph(Rows rows) {
  Part& part = parts_.at(rows.begin);
  part.graph.reset();
  part.memory.reset();
  part.inputs = Batch();
}

bool TwoPass::drop_graphs() {
  const bool any = kept_graphs() > 0;
  for (const auto& [begin, part] : parts_) drop_graph(part.rows);
  return any;
}

int64_t TwoPass::kept_graphs() const {
  return std::count_if(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part.second.graph.has_value(); });
}

GraphBytes TwoPass::kept_graph_bytes() const {
  GraphBytes sum;
  for (const auto& [begin, part] : parts_) {
    if (!part.graph || !part.memory) continue;
    const GraphBytes bytes = part.memory->bytes();
    sum.offloaded += bytes.offloaded;
    sum.stayed += bytes.stayed;
  }
  return sum;
}

const Batch* TwoPass::inputs_of_graph(Rows rows) const {
  const Part& part = parts_.at(rows.begin);
  return part.graph ? &part.inputs : nullptr;
}

int64_t TwoPass::leave(Rows rows) {
  Part& part = parts_.at(rows.begin);
  if (part.memory) return part.memory->start_leaving(*resources_.store, memory_of(seen(rows)));
  return problem_.loss.external() == nullptr ? outputs_.leave(rows) : 0;
}

int64_t TwoPass::offload(Rows rows) {
  Part& part = parts_.at(rows.begin);
  const int64_t bytes = part.memory ? offload_graph(part) : 0;
  return bytes + (problem_.loss.external() == nullptr ? outputs_.offload(rows) : 0);
}

Batch& TwoPass::seen(Rows rows) {
  return problem_.loss.external() != nullptr ? problem_.loss.external()->taken(rows)
                                             : outputs_.of(rows);
}

int64_t TwoPass::offload_graph(Part& part) {
  if (!problem_.goes_back_again) {
    part.tape = tape::Tape();  // no other forward follows
    part.random = RngSnapshot();
    part.buffers.reset();
  }
  GraphMemory& memory = *part.memory;
  const int64_t bytes =
      infinitybatch::offload_graph(memory, *resources_.store, *part.graph, seen(part.rows));
  if (problem_.loss.external() == nullptr) outputs_.compare_none(part.rows);
  graph_bytes_.offloaded += memory.bytes().offloaded;
  graph_bytes_.stayed += memory.bytes().stayed;
  return bytes;
}

int64_t TwoPass::fetch(Rows rows, bool ahead) {
  Part& part = parts_.at(rows.begin);
  const int64_t bytes = part.memory ? part.memory->fetch(ahead) : 0;
  return bytes + (problem_.loss.external() == nullptr ? outputs_.fetch(rows, ahead) : 0);
}

void TwoPass::again(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  Part& part = parts_.at(rows.begin);
  if (part.graph) {
    if (part.memory) part.memory->fetch(/*ahead=*/false);
    part.memory.reset();
    at_work_ = *std::exchange(part.graph, std::nullopt);
    part.inputs = Batch();
    return;
  }
  if (replays(part)) {
    at_work_ = tape::replay(part.tape, inputs);
    replayed_ = true;
  } else {
    opaque_ = part.tape.opaque;
    const RngSnapshot now = RngSnapshot::capture(devices_);
    const tape::GeneratorsGuard generators(part.tape);  // the user's own too
    part.random.restore();
    tape::set_states(part.tape.initial);
    // Past the version counter: where forward doesn't write them nothing changes, and graphs that
    // are kept stay valid.
    if (part.buffers) part.buffers->restore();
    try {
      at_work_ = forward();
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      const Unwatched unwatched;
      now.restore();
      throw;
    }
    now.restore();
  }
  if (!problem_.goes_back_again) {
    part.buffers.reset();
    part.tape = tape::Tape();
  }
  if (problem_.loss.external() != nullptr) return problem_.loss.external()->compare(rows, at_work_);
  outputs_.compare(rows, at_work_);
}

at::Tensor TwoPass::gradient(Rows rows, size_t leaf, const at::Tensor& output) {
  if (!seeds_.empty()) return seeds_[leaf];
  if (problem_.loss.external() != nullptr)
    return problem_.loss.external()->gradient(rows, leaf, output);
  return outputs_.gradient(rows, leaf, output.device());
}

void TwoPass::backward(Rows rows, const std::vector<at::Tensor>& except) {
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  const auto& leaves = at_work_.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& output = leaves[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor gradient = this->gradient(rows, i, output);
    if (!gradient.defined()) continue;  // the loss ignores this output
    roots.push_back(output);
    gradients.push_back(std::move(gradient));
  }
  if (roots.empty()) return;
  // The graph keeps what it needs of them.
  at_work_ = Batch();
  sinks_.redirect_other_leaves(roots, except);
  autograd::run_backward_of_part(roots, gradients);
}

void TwoPass::seed() {
  seeds_ = stand_in_gradients(at_work_);
}

void TwoPass::free() {
  given_ = Batch();
  at_work_ = Batch();
  seeds_.clear();
}

void TwoPass::check() const {
  if (!outputs_.differ()) return;
  if (replayed_) {
    throw tape::Mismatch("a replayed forward gave other outputs than its recording");
  }
  throw Unsupported(
      "forward gave other outputs when it ran again on the same rows under the same random state, "
      "so its gradient would not belong to the loss. It depends on a kernel that is not "
      "deterministic, on code that torch.compile compiled again in between (torch.compile(model, "
      "dynamic=True)), or on state other than parameters, buffers and torch's, NumPy's or Python's "
      "random numbers");
}

}  // namespace infinitybatch
