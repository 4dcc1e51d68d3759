#include <infinitybatch/step/wrap.hpp>

#include "wrapped_call.hpp"

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/coupled/coupling_watch.hpp>
#include <infinitybatch/execute/buffer_rule.hpp>
#include <infinitybatch/step/admission.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace infinitybatch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

/// One forward pass over all micro-batches.
class ForwardPass {
 public:
  ForwardPass(std::shared_ptr<Wrapped> wrapped, const Job& job, const Batch& inputs)
      : options_(wrapped->options),
        exact_(options_.batch_coupling == BatchCoupling::exact),
        recording_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()),
        call_(std::make_shared<WrappedCall>()),
        buffer_rule_(job.buffers, exact_) {
    call_->wrapped = std::move(wrapped);
    call_->device = job.device;
    call_->devices = devices_of(job);
    call_->buffers = job.buffers;
    call_->modes = tape::Modes::current();
    read(inputs);
    for (const NamedParameter& parameter : job.parameters) read(parameter);
    for (const BufferSlot& slot : job.buffers) {
      if (at::Tensor buffer = slot.get(); buffer.defined()) buffers_.push_back(std::move(buffer));
    }
    before_ = RngSnapshot::capture(call_->devices);
    if (recording_) values_ = std::make_shared<BufferValues>(job.buffers);
    // Casts made before lead into graphs of others.
    at::autocast::clear_cache();
  }

  /// \param total rows of all micro-batches
  Batch run(int64_t total) {
    int64_t size = *options_.micro_batch_size;
    for (int64_t row = 0; row < total;) {
      const Rows rows{row, std::min(row + size, total)};
      run(rows, total);
      row = rows.end;
      // A second size tells along which dimension outputs lie.
      const bool first = rows.begin == 0;
      const bool one_size = total % *options_.micro_batch_size == 0;
      const bool vary =
          first && one_size && size > 1 && is_ambiguous(outputs_.front(), rows.size(), options_);
      size = vary ? size - 1 : *options_.micro_batch_size;
    }
    return finish();
  }

  void roll_back() {
    buffer_rule_.roll_back();
    watch_.undo_writes();
    before_.restore();
  }

 private:
  void read(const Batch& inputs);
  void read(const NamedParameter& parameter);
  void run(Rows rows, int64_t total);
  Batch call_model(const Batch& micro);
  void note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node);
  Batch finish();

  const WrapOptions& options_;
  const bool exact_;
  const bool recording_;
  std::shared_ptr<WrappedCall> call_;
  BufferRule buffer_rule_;
  coupled::CouplingWatch watch_;
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<const BufferValues> values_;
  RngSnapshot before_;
  std::unordered_set<c10::TensorImpl*> known_leaves_;
  std::vector<Batch> outputs_;
  std::vector<int64_t> row_counts_;
  std::vector<bool> wants_gradient_;  // of each leaf of the outputs
  // What the node's edges need; the call itself holds inputs without their graph.
  Batch inputs_;
};

void ForwardPass::read(const Batch& inputs) {
  inputs_ = inputs;
  std::vector<Leaf> leaves = inputs.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    at::Tensor& tensor = leaves[i].tensor;
    if (!tensor.defined()) continue;
    if (recording_ && tensor.requires_grad()) call_->wanted_inputs.push_back(i);
    tensor = tensor.detach();
    const at::Device device = tensor.device();
    auto& devices = call_->devices;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  call_->inputs = Batch(std::move(leaves), inputs.structure());
}

void ForwardPass::read(const NamedParameter& parameter) {
  if (!recording_) return;
  const at::Tensor& tensor = parameter.tensor;
  if (!known_leaves_.insert(tensor.unsafeGetTensorImpl()).second) return;
  call_->requires_grad.emplace_back(tensor, tensor.requires_grad());
  if (tensor.requires_grad()) call_->leaves.push_back(parameter);
}

Batch ForwardPass::call_model(const Batch& micro) {
  const coupled::CouplingWatch::Scope watching(watch_);
  return call_->wrapped->model.forward(micro);
}

void ForwardPass::run(Rows rows, int64_t total) {
  if (options_.interrupt) options_.interrupt();
  const Batch micro = call_->micro_batch(rows);
  Batch outputs;
  WrappedCall::Part part;
  part.rows = rows;
  if (recording_) {
    part.random = RngSnapshot::capture(call_->devices);
    part.buffers = exact_ ? values_ : std::make_shared<BufferValues>(call_->buffers);
  }
  const uint64_t first_node = at::sequence_number::peek();
  if (!recording_) {
    outputs = call_model(micro);
  } else if (!call_->wrapped->use_tapes) {
    part.tape.opaque = "an earlier replay gave other outputs than its recording";
    outputs = call_model(micro);
  } else {
    tape::Recorder recorder(micro, buffers_, call_->devices);
    outputs = recorder.run([&] { return call_model(micro); });
    part.tape = recorder.finish(outputs);
    if (part.tape.refusal) {
      throw Unsupported(*part.tape.refusal +
                        ", so micro-batches would not see what the whole batch sees");
    }
  }
  if (exact_) watch_.check(rows.size(), total);
  if (recording_) note_graph(outputs, micro, first_node);
  outputs_.push_back(detached(outputs));
  row_counts_.push_back(rows.size());
  outputs = Batch();
  if (recording_) {
    std::vector<Leaf> numbers = outputs_.back().leaves();
    for (Leaf& leaf : numbers) {
      if (leaf.tensor.defined() && leaf.tensor.dim() > 0) leaf.tensor.reset();
    }
    part.numbers = Batch(std::move(numbers), outputs_.back().structure());
    call_->parts.push_back(std::move(part));
  }
  at::autocast::clear_cache();
  buffer_rule_.end_micro_batch();
}

/// Notes where gradients go that are no parameters of the model, before the graph is dropped.
void ForwardPass::note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node) {
  std::vector<at::Tensor> roots;
  wants_gradient_.resize(std::max(wants_gradient_.size(), outputs.leaves().size()), false);
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    wants_gradient_[i] = true;
    roots.push_back(tensor);
  }
  std::unordered_set<c10::TensorImpl*> of_inputs;
  for (const at::Tensor& tensor : micro.tensors()) of_inputs.insert(tensor.unsafeGetTensorImpl());
  const auto note_leaf = [&](const at::Tensor& leaf) {
    c10::TensorImpl* identity = leaf.unsafeGetTensorImpl();
    if (of_inputs.contains(identity) || !known_leaves_.insert(identity).second) return;
    call_->leaves.push_back({"a tensor that forward reads", leaf});
  };
  for (const at::Tensor& root : roots) {
    if (root.is_leaf()) note_leaf(root);
  }
  autograd::walk_graph(roots, [&](Node& node) {
    if (const auto* accumulator = dynamic_cast<AccumulateGrad*>(&node)) {
      note_leaf(accumulator->variable);
    } else if (node.sequence_nr() < first_node) {
      throw Unsupported(
          "forward reads a tensor that was computed before with a graph (" + node.name() +
          "), or that one micro-batch leaves for the next, so its gradient cannot be split; pass "
          "it "
          "as an input (shared, if every sample needs it), or compute it inside forward");
    }
  });
}

Batch ForwardPass::finish() {
  const at::NoGradGuard no_grad;
  JoinedOutputs joined = join(std::move(outputs_), row_counts_, options_);
  buffer_rule_.commit();
  Batch outputs = joined.whole;
  if (!recording_ ||
      std::find(wants_gradient_.begin(), wants_gradient_.end(), true) == wants_gradient_.end()) {
    return outputs;
  }
  for (const auto& [tensor, wanted] : call_->requires_grad) {
    call_->parameter_versions.push_back(Version::of("a parameter", tensor));
  }
  for (const at::Tensor& tensor : call_->inputs.tensors()) {
    call_->input_versions.push_back(Version::of("an input", tensor));
  }
  call_->outputs = std::move(joined);
  attach_node(call_, inputs_, wants_gradient_, outputs);
  return outputs;
}

}  // namespace

Wrap::Wrap(Model model, WrapOptions options) : wrapped_(std::make_shared<Wrapped>()) {
  if (options.memory_budget) {
    throw Unsupported(
        "wrap with a memory_budget is not there yet; give micro_batch_size, for instance the one "
        "that VirtualBatch(...).plan(...) finds for this budget");
  }
  if (!options.micro_batch_size) {
    throw InvalidArgument(
        "wrap needs a micro_batch_size: the number of samples that are computed at once");
  }
  if (*options.micro_batch_size < 1) {
    throw InvalidArgument("micro_batch_size is " + std::to_string(*options.micro_batch_size) +
                          "; it is a number of samples, 1 or more");
  }
  wrapped_->model = std::move(model);
  wrapped_->options = std::move(options);
}

Batch Wrap::forward(const Batch& inputs) const {
  const int64_t total = batch_size(inputs, "inputs");
  Job job;
  job.model = &wrapped_->model;
  admit_model(job);
  if (total <= *wrapped_->options.micro_batch_size) {
    return wrapped_->model.forward(to_device(inputs, job.device));
  }
  ForwardPass pass(wrapped_, job, inputs);
  try {
    return pass.run(total);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    pass.roll_back();
    throw;
  }
}

}  // namespace infinitybatch
