#include "coupled/renormed_weights.hpp"

#include "core/tensor_memory.hpp"
#include "core/torch_compat.hpp"
#include "coupled/original_weights.hpp"
#include "coupled/plain_copy.hpp"
#include "tape/op_bus.hpp"

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace infinitybatch::coupled {
namespace {

/// Of an interpreter's stack: what was there before comes first.
c10::ArrayRef<const c10::IValue> arguments_of(const tape::SeenOp& op, size_t count) {
  const auto stack = op.inputs();
  return stack.size() < count ? c10::ArrayRef<const c10::IValue>()
                              : stack.slice(stack.size() - count);
}

}  // namespace

void RenormedWeights::know_parameters(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& parameter : parameters) {
    if (c10::StorageImpl* storage = storage_of(parameter.tensor)) {
      parameters_.emplace(storage, parameter.tensor);
    }
  }
}

void RenormedWeights::expect(RenormedMemory* memory) {
  memory_ = memory;
  for (const auto& [storage, parameter] : parameters_) {
    if (memory->contains(storage)) prepare(parameter);
  }
}

RenormedWeights::Weight& RenormedWeights::prepare(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  Weight& weight = weights_[storage_of(parameter)];
  if (weight.parameter.defined()) return weight;
  weight.rows = parameter.variable_data();
  weight.version_before = version_of(parameter);
  // Whatever fails here, the op that is about to run cannot be held back.
  weight.parameter = parameter;
  copy_before_write(weight.rows, weight.before);
  weight.scaled = at::zeros({weight.rows.size(0)}, weight.rows.options().dtype(at::kBool));
  OriginalWeights::note(parameter);
  return weight;
}

const RenormedWeights::Weight* RenormedWeights::met(const at::Tensor& tensor) const {
  const auto found = weights_.find(storage_of(tensor));
  return found != weights_.end() && found->second.met ? &found->second : nullptr;
}

std::optional<std::string> RenormedWeights::meet(const at::Tensor& rows, double max_norm,
                                                 double norm_type) {
  const auto known = parameters_.find(storage_of(rows));
  if (known == parameters_.end()) return meet_other(rows, "a tensor that is no parameter");
  const at::Tensor& parameter = known->second;
  if (rows.storage_offset() != parameter.storage_offset() || rows.sizes() != parameter.sizes() ||
      rows.strides() != parameter.strides()) {
    return meet_other(rows, "a part of a parameter");
  }
  Weight& weight = weights_[known->first];
  if (!weight.met) {
    weight.met = any_ = true;
    weight.max_norm = max_norm;
    weight.norm_type = norm_type;
    if (memory_ != nullptr) memory_->insert(known->first);
    at_work_ = &prepare(parameter);
    return std::nullopt;
  }
  if (weight.max_norm != max_norm || weight.norm_type != norm_type) {
    return "two embeddings rewrite rows of the same weight by different norms";
  }
  at_work_ = &weight;
  return std::nullopt;
}

std::string RenormedWeights::meet_other(const at::Tensor& rows, const std::string& what) {
  auto& [tensor, before] = others_[storage_of(rows)];
  if (!tensor.defined()) {
    tensor = rows.variable_data();
    copy_before_write(tensor, before);
  }
  return "max_norm rewrites rows of " + what;
}

/// The rows that must not be scaled again.
void RenormedWeights::put_aside(const at::Tensor& indices) {
  const at::Tensor all = indices.detach().reshape({-1}).to(at::kLong);
  at::Tensor& scaled = at_work_->scaled;
  again_ = all.masked_select(scaled.index_select(0, all));
  rows_ = at_work_->rows.index_select(0, again_);
  scaled.index_fill_(0, all, true);
}

std::optional<std::string> RenormedWeights::begin(const tape::SeenOp& op) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  const auto arguments = arguments_of(op, 4);  // weight, indices, max_norm, norm_type
  if (arguments.empty()) return "max_norm rewrites rows of a weight";
  const at::Tensor& indices = arguments[1].toTensor();
  std::optional<std::string> why;
  bool begun = false;
  errors_.guard([&] {
    why = meet(arguments[0].toTensor(), arguments[2].toDouble(), arguments[3].toDouble());
    if (why) return;
    looked_up_.push_back({indices.storage().getWeakStorageImpl(), storage_of(at_work_->rows),
                          indices.storage_offset(), indices.numel(), version_of(indices)});
    put_aside(indices);
    begun = true;
  });
  if (!begun) at_work_ = nullptr;
  return why;
}

void RenormedWeights::end() {
  if (at_work_ == nullptr) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  Weight& weight = *std::exchange(at_work_, nullptr);
  errors_.guard([&] {
    if (again_.numel() > 0) weight.rows.index_copy_(0, again_, rows_);
    if (!weight.version_after) {
      weight.version_after = version_of(weight.parameter);
    } else if (!weight.parameter.is_inference()) {
      compat::set_version(weight.parameter, *weight.version_after);
    }
  });
  again_.reset();
  rows_.reset();
}

bool RenormedWeights::is_lookup(const tape::SeenOp& op) const {
  const tape::OpFacts* facts = op.facts();
  if (facts == nullptr || !facts->looks_up) return false;
  const auto arguments = arguments_of(op, facts->argument_count);
  if (arguments.empty() || !arguments[0].isTensor() || !arguments[1].isTensor()) return false;
  const c10::StorageImpl* weight = storage_of(arguments[0].toTensor());
  const at::Tensor& indices = arguments[1].toTensor();
  return std::any_of(looked_up_.begin(), looked_up_.end(), [&](const Indices& known) {
    return known.weight == weight && known.storage._unsafe_get_target() == storage_of(indices) &&
           known.offset == indices.storage_offset() && known.count == indices.numel() &&
           known.version == version_of(indices);
  });
}

std::optional<std::string> RenormedWeights::other_read(const tape::SeenOp& op) const {
  const tape::OpFacts* facts = op.facts();
  if (facts == nullptr) return std::nullopt;  // what it calls is seen
  const auto arguments = arguments_of(op, facts->argument_count);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (facts->viewed[i]) continue;  // whoever reads the view is seen
    bool read = arguments[i].isTensor() && met(arguments[i].toTensor()) != nullptr;
    if (arguments[i].isTensorList() || arguments[i].isOptionalTensorList()) {
      for (const c10::IValue& element : arguments[i].toListRef()) {
        read = read || (element.isTensor() && met(element.toTensor()) != nullptr);
      }
    }
    if (!read) continue;
    return "max_norm rewrites rows of a weight that " + facts->name() +
           " reads too, and micro-batches have rewritten only their own by then";
  }
  return std::nullopt;
}

void RenormedWeights::undo() {
  const at::NoGradGuard no_grad;
  for (auto& [storage, weight] : weights_) {
    if (!weight.before.defined()) continue;
    weight.rows.copy_(weight.before);
    if (!weight.parameter.is_inference()) {
      compat::set_version(weight.parameter, weight.version_before);
    }
    if (weight.scaled.defined()) weight.scaled.zero_();
    weight.met = false;
    weight.version_after.reset();
  }
  for (auto& [storage, other] : others_) other.first.copy_(other.second);
  others_.clear();
  any_ = false;
  looked_up_.clear();
  errors_.forget();
}

void RenormedWeights::commit() {
  for (auto& [storage, weight] : weights_) weight.before.reset();
  others_.clear();
}

}  // namespace infinitybatch::coupled
