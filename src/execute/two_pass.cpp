#include <infinitybatch/execute/two_pass.hpp>

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/bits.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/tape/mismatch.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace infinitybatch {
namespace {

template <typename Change>
Batch map_tensors(const Batch& batch, Change&& change) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = change(leaf.tensor);
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace

TwoPass::TwoPass(const Job& job, autograd::GradientSinks& sinks)
    : job_(job), sinks_(sinks), devices_(devices_of(job)) {
  for (const BufferSlot& slot : job.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers_.push_back(std::move(buffer));
  }
}

at::Device TwoPass::loss_device() const {
  return job_.coupled->device().value_or(job_.device);
}

const Batch& TwoPass::first(Rows rows, const Batch& inputs, bool retain,
                            const std::function<Batch()>& forward) {
  Part& part = parts_[rows.begin];
  part.rows = rows;
  part.random = RngSnapshot::capture(devices_);
  if (!job_.exact_coupling) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : buffers_) part.buffers.push_back(buffer.detach().clone());
  }
  Batch outputs;
  if (!job_.use_tapes) {
    part.tape.opaque = "an earlier replay gave other outputs than its recording";
    outputs = forward();
  } else if (retain && job_.buffers.empty()) {
    outputs = forward();
  } else {
    tape::Recorder recorder(inputs, buffers_, devices_);
    outputs = recorder.run(forward);
    part.tape = recorder.finish(outputs);
    if (part.tape.refusal) {
      throw Unsupported(*part.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  if (!part.tape.opaque) {  // a tape has what it needs of both, a graph that is kept needs neither
    part.random = RngSnapshot();
    part.buffers.clear();
  }
  part.outputs = detached(outputs);
  if (loss_device() != job_.device) {
    part.outputs = map_tensors(part.outputs,
                               [&](const at::Tensor& tensor) { return tensor.to(loss_device()); });
  }
  for (const Leaf& leaf : outputs.leaves()) {
    part.wants_gradient.push_back(leaf.tensor.defined() && leaf.tensor.requires_grad());
  }
  if (retain) part.graph = std::move(outputs);
  return part.outputs;
}

void TwoPass::drop_graph(Rows rows) {
  parts_.at(rows.begin).graph.reset();
}

void TwoPass::assemble() {
  const at::NoGradGuard no_grad;
  std::vector<Batch> outputs;
  std::vector<int64_t> row_counts;
  for (auto& [begin, part] : parts_) {
    outputs.push_back(std::exchange(part.outputs, Batch()));
    row_counts.push_back(part.rows.size());
    wants_gradient_.resize(part.wants_gradient.size(), false);
    for (size_t i = 0; i < wants_gradient_.size(); ++i) {
      wants_gradient_[i] = wants_gradient_[i] || part.wants_gradient[i];
    }
  }
  whole_ = concatenate(std::move(outputs), row_counts, "outputs");
}

at::Tensor TwoPass::whole_loss() {
  assemble();
  std::vector<Leaf> leaves = whole_.leaves();
  std::vector<at::Tensor> wanted;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!wants_gradient_[i]) continue;
    leaves[i].tensor = leaves[i].tensor.detach().requires_grad_();
    wanted.push_back(leaves[i].tensor);
  }
  const Batch targets = job_.targets->rows(0, job_.batch_size());
  const at::Tensor loss =
      job_.coupled->value({leaves, whole_.structure()}, to_device(targets, loss_device()));
  if (!loss.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on anything that requires grad; check that the model's "
        "parameters require grad and that its outputs are not detached");
  }
  sinks_.redirect_other_leaves({loss}, wanted);
  const at::Tensor gradient =
      job_.loss_scale.defined() ? job_.loss_scale.to(loss.device(), loss.scalar_type()).reshape({})
                                : at::ones_like(loss);
  autograd::run_backward({loss}, {gradient});
  for (size_t i = 0; i < leaves.size(); ++i) {
    gradients_.push_back(wants_gradient_[i] ? leaves[i].tensor.grad() : at::Tensor());
  }
  return loss.detach();
}

void TwoPass::again(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  Part& part = parts_.at(rows.begin);
  if (part.graph) {
    at_work_ = *std::exchange(part.graph, std::nullopt);
    return;
  }
  if (!part.tape.opaque) {
    at_work_ = tape::replay(part.tape, inputs);
    replayed_ = true;
  } else {
    opaque_ = part.tape.opaque;
    const RngSnapshot now = RngSnapshot::capture(devices_);
    part.random.restore();
    // Past the version counter: where forward doesn't write them nothing changes, and graphs that
    // are kept stay valid.
    for (size_t i = 0; i < part.buffers.size(); ++i) {
      buffers_[i].variable_data().copy_(part.buffers[i]);
    }
    part.buffers.clear();
    at_work_ = forward();
    now.restore();
  }
  part.tape = tape::Tape();
  compare(part, at_work_);
}

void TwoPass::compare(const Part& part, const Batch& outputs) {
  const at::NoGradGuard no_grad;
  const Batch seen = whole_.structure()
                         ? infinitybatch::rows(whole_, part.rows.begin, part.rows.end)
                         : part.outputs;
  if (!differs_.defined()) {
    differs_ = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(loss_device()));
  }
  note_differences(seen, outputs, differs_);
}

void TwoPass::backward(Rows rows) {
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  const auto& leaves = at_work_.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& output = leaves[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor gradient;
    if (!seeds_.empty()) {
      gradient = seeds_[i];
    } else if (i < gradients_.size() && gradients_[i].defined()) {
      const int64_t dim = whole_.leaves()[i].batch_dim;
      gradient =
          dim == Leaf::kShared ? gradients_[i] : gradients_[i].narrow(dim, rows.begin, rows.size());
      gradient = gradient.to(output.device());
    }
    if (!gradient.defined()) continue;  // the loss ignores this output
    roots.push_back(output);
    gradients.push_back(std::move(gradient));
  }
  if (roots.empty()) return;
  // The graph keeps what it needs of them.
  at_work_ = Batch();
  sinks_.redirect_other_leaves(roots);
  autograd::run_backward(roots, gradients);
}

void TwoPass::seed() {
  for (const Leaf& leaf : at_work_.leaves()) {
    const bool wanted = leaf.tensor.defined() && leaf.tensor.requires_grad();
    seeds_.push_back(wanted ? at::ones_like(leaf.tensor.detach(), at::MemoryFormat::Contiguous)
                            : at::Tensor());
  }
}

void TwoPass::free() {
  at_work_ = Batch();
  seeds_.clear();
}

void TwoPass::check() const {
  if (!differs_.defined() || !differs_.item<bool>()) return;
  if (replayed_) {
    throw tape::Mismatch("a replayed forward gave other outputs than its recording");
  }
  throw Unsupported(
      "forward gave other outputs when it ran again on the same rows under the same random state, "
      "so its gradient would not belong to the loss; it depends on state that is neither a "
      "parameter, a buffer nor torch's, NumPy's or Python's random numbers, or on a kernel that is "
      "not deterministic");
}

}  // namespace infinitybatch
