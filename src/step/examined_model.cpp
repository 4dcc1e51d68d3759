#include "step/examined_model.hpp"

#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"
#include "step/admission.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <utility>

namespace infinitybatch {
namespace {

/// Copies of tensors in fp64: those that share memory share it there too.
class DoubleCopies {
 public:
  void expect(const at::Tensor& tensor) { ++tensors_[storage_of(tensor)]; }

  at::Tensor of(const at::Tensor& tensor) {
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr || tensors_[storage] < 2 || tensor.layout() != at::kStrided) {
      return value_of(to_double(tensor));
    }
    at::Tensor& whole = wholes_[{storage, tensor.scalar_type()}];
    if (!whole.defined()) {
      const auto count = static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
      const at::Tensor here = at::empty({0}, tensor.options().requires_grad(false));
      here.set_(tensor.storage(), 0, {count}, {1});
      whole = to_double(here).clone();
    }
    return whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }

 private:
  std::map<const c10::StorageImpl*, int> tensors_;
  std::map<std::pair<const c10::StorageImpl*, at::ScalarType>, at::Tensor> wholes_;
};

at::Tensor copied_to_double(const at::Tensor& numbers) {
  return numbers.to(numbers.is_complex() ? at::kComplexDouble : at::kDouble, false, /*copy=*/true);
}

/// What a tensor of any kind says, as plain numbers; undefined where nobody can read it.
at::Tensor numbers_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || !can_be_compared(tensor)) return {};
  if (is_plain(tensor)) return copied_to_double(tensor.detach());
  if (tensor.is_quantized()) return copied_to_double(tensor.dequantize());
  if (!tensor.is_nested() && !tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return copied_to_double(tensor.detach().to_dense());
  }
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : parts_of(tensor).tensors) {
    parts.push_back(copied_to_double(part.detach().reshape({-1})));
  }
  return at::cat(parts);
}

}  // namespace

ParameterWrites::ParameterWrites(const std::vector<NamedParameter>& parameters) {
  memory_.expect(parameters.size());
  for (const NamedParameter& each : parameters) memory_.know(each.tensor, /*carried=*/false);
}

std::unique_ptr<tape::OpContext> ParameterWrites::begin(const tape::SeenOp& op) noexcept {
  errors_.guard([&] { memory_.observe(op); });
  return nullptr;
}

at::Tensor ParameterWrites::before(const at::Tensor& parameter) const {
  const std::optional<size_t> place = memory_.find(parameter);
  return place ? memory_[*place].before : at::Tensor();
}

ExaminedModel::ExaminedModel(const Problem& problem)
    : problem_(problem),
      random_(RngSnapshot::capture(devices_of(problem))),
      values_(problem.buffers) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& parameter : problem.parameters) {
    const at::Tensor& tensor = parameter.tensor;
    Kept kept;
    kept.name = parameter.name;
    kept.tensor = tensor;
    kept.data = kept.now = tensor.variable_data();
    kept.grad = tensor.grad();
    kept.accumulator = compat::accumulator_of(tensor);
    parameters_.push_back(std::move(kept));
  }
  for (const at::Tensor& tensor : values_.tensors()) {
    Kept kept;
    kept.tensor = tensor;
    kept.data = kept.now = tensor.variable_data();
    buffers_.push_back(std::move(kept));
  }
  begin_watch();
}

void ExaminedModel::begin_watch() {
  watch_.emplace();
  watch_->know_parameters(problem_.parameters);
  writes_.emplace(problem_.parameters);
}

Batch ExaminedModel::forward(const Batch& inputs) {
  const coupled::CouplingWatch::Scope watching(*watch_);
  const int64_t total = problem_.batch_size();
  const CarriedState::Scope stateful(&state_, {0, total}, total);
  Batch outputs;
  watch([&] { outputs = problem_.model->forward(inputs); });
  watch_->rethrow();
  return outputs;
}

void ExaminedModel::watch(const std::function<void()>& step) {
  {
    const tape::OpBus::Scope listening(*writes_);
    step();
  }
  writes_->rethrow();
}

ExaminedModel::~ExaminedModel() {
  state_.runs().roll_back();
  const at::NoGradGuard no_grad;
  weights_.restore();
  writes_->undo();
  for (Kept& kept : parameters_) {
    kept.tensor.mutable_grad() = at::Tensor();
    kept.now = kept.data;
  }
  put_back_parameters();
  for (const Kept& kept : parameters_) {
    // A change of type drops the accumulator, and with it hooks that somebody holds it for.
    if (in_double_ && kept.accumulator) compat::set_accumulator(kept.tensor, kept.accumulator);
    kept.tensor.mutable_grad() = kept.grad;
  }
  for (const Kept& kept : buffers_) {
    if (in_double_) at::Tensor(kept.tensor).set_data(kept.data);
  }
  values_.restore();
  random_.restore();
}

void ExaminedModel::turn_to_double() {
  reset();
  const at::NoGradGuard no_grad;
  in_double_ = true;
  weights_.forget();
  DoubleCopies copies;
  const auto each = [this](const auto& what) {
    for (Kept& kept : parameters_) what(kept);
    for (Kept& kept : buffers_) what(kept);
  };
  each([&](const Kept& kept) { copies.expect(kept.data); });
  each([&](Kept& kept) {
    kept.now = copies.of(kept.data);
    at::Tensor(kept.tensor).set_data(kept.now);
  });
  begin_watch();  // of other memory
}

void ExaminedModel::reset() {
  state_.runs().roll_back();
  const at::NoGradGuard no_grad;
  watch_->renormed()->undo();
  weights_.restore();  // what steps of others did
  for (const Kept& kept : parameters_) kept.tensor.mutable_grad() = at::Tensor();
  writes_->undo();
  put_back_parameters();
  values_.restore();
  random_.restore();
}

/// Forward may have given them other memory (`.data = ...`).
void ExaminedModel::put_back_parameters() {
  for (const Kept& kept : parameters_) {
    const bool elsewhere = !kept.tensor.has_storage() || !kept.now.has_storage() ||
                           storage_of(kept.tensor) != storage_of(kept.now) ||
                           kept.tensor.storage_offset() != kept.now.storage_offset();
    if (elsewhere) at::Tensor(kept.tensor).set_data(kept.now);
  }
}

std::vector<NamedParameter> ExaminedModel::take_gradients() {
  std::vector<NamedParameter> gradients;
  for (const NamedParameter& parameter : problem_.model->parameters()) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    gradients.push_back(
        {parameter.name, grad.defined() ? to_double(grad.detach().to_dense()) : at::Tensor()});
    grad = at::Tensor();
  }
  return gradients;
}

bool ExaminedModel::is_other(const NamedParameter& parameter) const {
  const auto kept = std::find_if(parameters_.begin(), parameters_.end(),
                                 [&](const Kept& each) { return each.name == parameter.name; });
  if (kept == parameters_.end() || !kept->tensor.is_same(parameter.tensor)) return true;
  if (storage_of(kept->tensor) != storage_of(kept->now)) return true;
  const at::Tensor before = writes_->before(kept->tensor);
  return before.defined() && !at::equal(before, kept->tensor.detach());
}

std::vector<NamedParameter> ExaminedModel::read_values() const {
  const at::NoGradGuard no_grad;
  std::vector<NamedParameter> values;
  // Parameters are asked for first.
  for (const NamedParameter& parameter : problem_.model->parameters()) {
    at::Tensor numbers = is_other(parameter) ? numbers_of(parameter.tensor) : at::Tensor();
    if (numbers.defined()) values.push_back({parameter.name, std::move(numbers)});
  }
  for (const BufferSlot& slot : problem_.model->buffers()) {
    values.push_back({slot.name, numbers_of(slot.get())});
  }
  return values;
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
