#include <infinitybatch/execute/two_pass.hpp>

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/tape/draws.hpp>
#include <infinitybatch/tape/mismatch.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
TwoPass::TwoPass(const Job& job, autograd::GradientSinks& sinks)
    : job_(job), sinks_(sinks), devices_(devices_of(job)), outputs_(job) {
  for (const BufferSlot& slot : job.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers_.push_back(std::move(buffer));
  }
}

const Batch& TwoPass::first(Rows rows, const Batch& inputs, bool retain,
                            const std::function<Batch()>& forward) {
  Part& part = parts_[rows.begin];
  part.memory.reset();
  if (retain && job_.offloads_graphs) part.memory.emplace().know(inputs);
  const auto run = [&] { return part.memory ? part.memory->watch(forward) : forward(); };
  part.rows = rows;
  part.random = RngSnapshot::capture(devices_);
  if (!job_.exact_coupling) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : buffers_) part.buffers.push_back(buffer.detach().clone());
  }
  Batch outputs;
  if (!job_.use_tapes) {
    part.tape.opaque = job_.tapes_failed ? "an earlier replay gave other outputs than its recording"
                                         : "use_tapes=false was given";
    outputs = run();
  } else if (retain && !job_.tapes_stay && job_.buffers.empty() && !job_.learns_output_law(rows) &&
             !job_.examines(rows)) {
    outputs = run();
  } else {
    tape::Recorder recorder(inputs, buffers_, devices_);
    outputs = recorder.run(run);
    part.tape = recorder.finish(outputs);
    if (part.tape.refusal && !(retain && job_.buffers.empty())) {
      throw Unsupported(*part.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  if (!part.tape.opaque) {  // a tape has what it needs of both, a graph that is kept needs neither
    part.random = RngSnapshot();
    part.buffers.clear();
  }
  const Batch& seen = outputs_.add(rows, outputs);
  if (retain) part.graph = std::move(outputs);
  return seen;
}

bool TwoPass::keeps_graph_before(Rows rows) const {
  return std::any_of(parts_.begin(), parts_.lower_bound(rows.begin),
                     [](const auto& part) { return part.second.graph.has_value(); });
}

void TwoPass::drop_graph(Rows rows) {
  Part& part = parts_.at(rows.begin);
  part.graph.reset();
  part.memory.reset();
}

int64_t TwoPass::leave(Rows rows) {
  Part& part = parts_.at(rows.begin);
  if (!part.memory) return outputs_.leave(rows);
  return part.memory->start_leaving(*job_.store, memory_of(outputs_.of(rows)));
}

int64_t TwoPass::offload(Rows rows) {
  Part& part = parts_.at(rows.begin);
  return (part.memory ? offload_graph(part) : 0) + outputs_.offload(rows);
}

int64_t TwoPass::offload_graph(Part& part) {
  if (!job_.tapes_stay) {
    part.tape = tape::Tape();  // no other forward follows
    part.random = RngSnapshot();
    part.buffers.clear();
  }
  GraphMemory& memory = *part.memory;
  const int64_t bytes =
      infinitybatch::offload_graph(memory, *job_.store, *part.graph, outputs_.of(part.rows));
  outputs_.compare_none(part.rows);
  graph_bytes_.offloaded += memory.bytes().offloaded;
  graph_bytes_.stayed += memory.bytes().stayed;
  return bytes;
}

int64_t TwoPass::fetch(Rows rows, bool ahead) {
  Part& part = parts_.at(rows.begin);
  return (part.memory ? part.memory->fetch(ahead) : 0) + outputs_.fetch(rows, ahead);
}

void TwoPass::again(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  Part& part = parts_.at(rows.begin);
  if (part.graph) {
    if (part.memory) part.memory->fetch(/*ahead=*/false);
    part.memory.reset();
    at_work_ = *std::exchange(part.graph, std::nullopt);
    return;
  }
  if (!part.tape.opaque) {
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
    for (size_t i = 0; i < part.buffers.size(); ++i) {
      buffers_[i].variable_data().copy_(part.buffers[i]);
    }
    at_work_ = forward();
    now.restore();
  }
  if (!job_.tapes_stay) {
    part.buffers.clear();
    part.tape = tape::Tape();
  }
  outputs_.compare(rows, at_work_);
}

void TwoPass::backward(Rows rows) {
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  const auto& leaves = at_work_.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& output = leaves[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor gradient = seeds_.empty() ? outputs_.gradient(rows, i, output.device()) : seeds_[i];
    if (!gradient.defined()) continue;  // the loss ignores this output
    roots.push_back(output);
    gradients.push_back(std::move(gradient));
  }
  if (roots.empty()) return;
  // The graph keeps what it needs of them.
  at_work_ = Batch();
  sinks_.redirect_other_leaves(roots);
  autograd::run_backward_of_part(roots, gradients);
}

void TwoPass::seed() {
  seeds_ = stand_in_gradients(at_work_);
}

void TwoPass::free() {
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
