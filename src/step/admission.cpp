#include "step/admission.hpp"

#include "core/kept_batch.hpp"
#include "core/transforms.hpp"
#include "step/mark_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace infinitybatch {
namespace {

void check_grad_mode() {
  if (c10::InferenceMode::is_enabled()) {
    throw StateError("backward() needs gradients: call it outside torch.inference_mode()");
  }
  if (!at::GradMode::is_enabled()) {
    throw StateError("backward() needs gradients: call it outside torch.no_grad()");
  }
}

bool may_be_trained(const at::Tensor& tensor) {
  return !tensor.is_inference() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.is_meta() && !has_tangent(tensor);
}

/// \param kind "parameter" or "buffer"
void check_tensor(const char* kind, const std::string& name, const at::Tensor& tensor) {
  if (may_be_trained(tensor)) return;  // no text is made of all names in each step
  const std::string what = std::string(kind) + " '" + name + "'";
  if (tensor.is_inference()) {
    throw Unsupported(what +
                      " was made in inference mode, so autograd cannot use it; clone it outside of "
                      "torch.inference_mode()");
  }
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    throw Unsupported(what +
                      " is a tensor subclass (DTensor, FSDP), whose gradient cannot be summed "
                      "exactly yet; pass a model whose parameters are plain tensors");
  }
  if (tensor.is_meta()) {
    throw Unsupported(what +
                      " is on the meta device and has no values; load it first, as in "
                      "model.to_empty(device=\"cpu\").load_state_dict(...)");
  }
  refuse_tangent(what, tensor);
}

/// Which other dimension of inputs has as many samples as targets have.
std::string hint_at_batch_dim(const BatchSource& inputs, int64_t samples) {
  if (inputs.size < 1 || !inputs.uniform) return "";
  const Batch row = inputs.rows(0, 1);
  for (const Leaf& leaf : row.leaves()) {
    if (!leaf.tensor.defined() || leaf.batch_dim < 0) continue;
    for (const int64_t dim : {0, 1}) {
      if (dim == leaf.batch_dim || dim >= leaf.tensor.dim()) continue;
      if (leaf.tensor.size(dim) != samples) continue;
      return ". If samples lie along dimension " + std::to_string(dim) + " of inputs, " +
             (dim == 0 ? "leave out batch_dim" : "as in [time, batch, ...], say batch_dim=1");
    }
  }
  return "";
}

at::Device device_of(const Problem& problem) {
  for (const NamedParameter& parameter : problem.parameters) return parameter.tensor.device();
  for (const at::Tensor& buffer : buffers_of(problem)) return buffer.device();
  return at::kCPU;
}

}  // namespace

void admit(Problem& problem) {
  check_grad_mode();
  if (std::string why = why_no_rows(*problem.targets); !why.empty()) {
    throw BatchError(std::move(why));
  }
  if (problem.inputs->size != problem.targets->size) {
    throw BatchError("inputs have " + std::to_string(problem.inputs->size) + " samples, targets " +
                     std::to_string(problem.targets->size) + "; both need the same number" +
                     (problem.inputs->size > 0 && problem.targets->size > problem.inputs->size &&
                              problem.targets->size % problem.inputs->size == 0
                          ? ". If targets are [time, batch] flattened, say batch_dim=1, or "
                            "batch_dim={\"targets\": 1} beside other arguments"
                          : hint_at_batch_dim(*problem.inputs, problem.targets->size)));
  }
  if (problem.batch_size() < 1) throw BatchError("the batch is empty: it has 0 samples");
  admit_model(problem);
}

Problem admitted(const Model& model, const Loss& loss, const BatchSource& inputs,
                 const BatchSource& targets) {
  Problem problem;
  problem.model = &model;
  problem.loss = loss;
  problem.inputs = &inputs;
  problem.targets = &targets;
  admit(problem);
  return problem;
}

void admit_model(Problem& problem) {
  refuse_transforms();
  problem.parameters = problem.model->parameters();
  problem.buffers = problem.model->buffers();
  for (const NamedParameter& parameter : problem.parameters) {
    check_tensor("parameter", parameter.name, parameter.tensor);
  }
  for (const BufferSlot& buffer : problem.buffers) {
    if (const at::Tensor tensor = buffer.get(); tensor.defined()) {
      check_tensor("buffer", buffer.name, tensor);
    }
  }
  problem.device = device_of(problem);
  problem.training = problem.model->is_training();
}

BatchSource no_targets(const Batch& targets, int64_t size) {
  return {size, [targets](int64_t, int64_t) { return targets; }, "none", Dims(), /*uniform=*/true};
}

BatchSource targets_source(const Batch& targets, int64_t size, const Loss& loss) {
  if (targets.tensors().empty()) return no_targets(targets, size);
  return targets_for(loss, targets_as_given(targets), size);
}

Sources sources_of(const Batch& inputs, const Batch& targets, const std::optional<BatchDim>& given,
                   const Loss& loss) {
  const bool whole = std::holds_alternative<CoupledLoss>(loss);
  const Batch marked = given ? mark_inputs(inputs, *given) : inputs;
  const Batch beside = given ? mark_targets(targets, *given, extent_of(marked), whole) : targets;
  BatchSource rows = BatchSource::from(marked, "inputs");
  const int64_t size = rows.size;
  return {std::move(rows), targets_source(beside, size, loss)};
}

BatchSource targets_for(const Loss& loss, const BatchSource& targets, int64_t samples) {
  return std::holds_alternative<CoupledLoss>(loss) ? whole_targets(targets, samples) : targets;
}

void refuse_batch_dim(const std::optional<BatchDim>& given) {
  if (!given) return;
  throw InvalidArgument(
      "batch_dim is for batches that are given as tensors; the rows of a BatchSource, and tensors "
      "of "
      "a LogicalBatch, are marked where they are made: rows.with_batch_dim(1)");
}

std::vector<at::Tensor> reachable_tensors(const Problem& problem) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : problem.parameters) {
    tensors.push_back(parameter.tensor);
    if (parameter.tensor.grad().defined()) tensors.push_back(parameter.tensor.grad());
  }
  for (const BufferSlot& buffer : problem.buffers) {
    if (const at::Tensor tensor = buffer.get(); tensor.defined()) tensors.push_back(tensor);
  }
  return tensors;
}

std::vector<const void*> owned_by(const Problem& problem) {
  std::vector<const void*> owned;
  for (const NamedParameter& each : problem.parameters) {
    owned.push_back(each.tensor.unsafeGetTensorImpl());
    if (!each.tensor.requires_grad()) owned.push_back(nullptr);  // forward may ask
  }
  for (const BufferSlot& slot : problem.buffers) owned.push_back(slot.get().unsafeGetTensorImpl());
  return owned;
}

}  // namespace infinitybatch
