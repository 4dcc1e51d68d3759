#include "step/examined_model.hpp"

#include "step/admission.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace infinitybatch {

ExaminedModel::ExaminedModel(const Problem& problem)
    : problem_(problem), random_(RngSnapshot::capture(devices_of(problem))) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& parameter : problem.parameters) {
    const at::Tensor& tensor = parameter.tensor;
    parameters_.push_back({nullptr,
                           tensor,
                           tensor.variable_data(),
                           {},
                           tensor.grad(),
                           compat::accumulator_of(tensor)});
  }
  for (const BufferSlot& slot : problem.buffers) {
    const at::Tensor tensor = slot.get();
    if (!tensor.defined()) continue;
    buffers_.push_back({&slot, tensor, tensor.variable_data(), tensor.detach().clone(), {}, {}});
  }
  begin_watch();
}

void ExaminedModel::begin_watch() {
  watch_.emplace();
  watch_->know_parameters(problem_.parameters);
}

Batch ExaminedModel::forward(const Batch& inputs) {
  const coupled::CouplingWatch::Scope watching(*watch_);
  const CarriedState::Scope stateful(&state_, /*part=*/false, problem_.batch_size());
  Batch outputs = problem_.model->forward(inputs);
  watch_->rethrow();
  return outputs;
}

ExaminedModel::~ExaminedModel() {
  state_.runs().roll_back();
  const at::NoGradGuard no_grad;
  weights_.restore();
  for (const Kept& kept : parameters_) {
    kept.tensor.mutable_grad() = at::Tensor();
    if (in_double_) {
      at::Tensor(kept.tensor).set_data(kept.data);
      // A change of type drops the accumulator, and with it hooks that somebody holds it for.
      if (kept.accumulator) compat::set_accumulator(kept.tensor, kept.accumulator);
    }
    kept.tensor.mutable_grad() = kept.grad;
  }
  for (const Kept& kept : buffers_) {
    if (in_double_) at::Tensor(kept.tensor).set_data(kept.data);
    put_back(kept);
  }
  random_.restore();
}

void ExaminedModel::turn_to_double() {
  const at::NoGradGuard no_grad;
  in_double_ = true;
  weights_.restore();
  weights_.forget();
  for (const Kept& kept : parameters_) {
    kept.tensor.mutable_grad() = at::Tensor();
    at::Tensor(kept.tensor).set_data(to_double(kept.data));
  }
  for (const Kept& kept : buffers_) at::Tensor(kept.tensor).set_data(to_double(kept.data).clone());
  begin_watch();  // of other memory
}

void ExaminedModel::reset() {
  state_.runs().roll_back();
  const at::NoGradGuard no_grad;
  watch_->renormed()->undo();
  weights_.restore();  // what steps of others did
  for (const Kept& kept : parameters_) kept.tensor.mutable_grad() = at::Tensor();
  for (const Kept& kept : buffers_) put_back(kept);
  random_.restore();
}

std::vector<at::Tensor> ExaminedModel::take_gradients() {
  std::vector<at::Tensor> gradients;
  for (const Kept& kept : parameters_) {
    at::Tensor& grad = kept.tensor.mutable_grad();
    at::Tensor taken = grad.defined() ? to_double(grad.detach().to_dense()) : at::Tensor();
    gradients.push_back(std::move(taken));
    grad = at::Tensor();
  }
  return gradients;
}

void ExaminedModel::put_back(const Kept& buffer) {
  if (!buffer.slot->get().is_same(buffer.tensor)) buffer.slot->set(buffer.tensor);
  buffer.tensor.variable_data().copy_(buffer.values);
}

std::vector<at::Tensor> ExaminedModel::read_buffers() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const Kept& kept : buffers_) {
    const at::Tensor now = kept.slot->get();
    const bool readable = now.defined() && !now.is_quantized();
    if (!readable) {
      values.emplace_back();
      continue;
    }
    const at::Tensor dense = now.detach().to_dense();
    values.push_back(dense.is_complex() ? dense.to(at::kComplexDouble, false, /*copy=*/true)
                                        : dense.to(at::kDouble, false, /*copy=*/true));
  }
  return values;
}

std::vector<std::string> ExaminedModel::buffer_names() const {
  std::vector<std::string> names;
  for (const Kept& kept : buffers_) names.push_back(kept.slot->name);
  return names;
}

at::Tensor to_double(const at::Tensor& tensor) {
  if (tensor.is_complex()) return tensor.to(at::kComplexDouble);
  return tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor;
}

Batch to_double(const Batch& batch) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = to_double(leaf.tensor);
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace infinitybatch
