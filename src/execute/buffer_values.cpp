#include "execute/buffer_values.hpp"

#include "core/tensor_memory.hpp"
#include "core/tensor_values.hpp"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

namespace infinitybatch {

void restore_buffer(const BufferSlot& slot, const at::Tensor& tensor, const at::Tensor& values) {
  if (!slot.get().is_same(tensor)) slot.set(tensor);
  if (!tensor.defined() || !values.defined()) return;
  if (!put_back(tensor, values)) slot.set(value_of(values));
}

BufferValues::BufferValues(const std::vector<BufferSlot>& slots) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const BufferSlot& slot : slots) {
    Entry entry{slot, slot.get(), {}};
    const bool first =
        entry.tensor.defined() && seen.insert(entry.tensor.unsafeGetTensorImpl()).second;
    if (first) entry.values = value_of(entry.tensor);
    entries_.push_back(std::move(entry));
  }
}

void BufferValues::add(const at::Tensor& parameter, const at::Tensor& memory,
                       const at::Tensor& values) {
  parameters_.push_back({parameter, memory, values});
}

void BufferValues::add_parameters_of(const BufferValues& others) {
  for (const Parameter& each : others.parameters_) {
    add(each.parameter, each.parameter.variable_data(), each.parameter.detach().clone());
  }
}

bool BufferValues::has_parameter(const at::Tensor& tensor) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& each) { return each.parameter.is_same(tensor); });
}

void BufferValues::restore() const {
  const at::NoGradGuard no_grad;
  for (const Parameter& each : parameters_) {
    const bool elsewhere = storage_of(each.parameter) != storage_of(each.memory) ||
                           each.parameter.storage_offset() != each.memory.storage_offset();
    if (elsewhere) at::Tensor(each.parameter).set_data(each.memory);
    if (each.values.defined()) at::Tensor(each.memory).copy_(each.values);
  }
  for (const Entry& entry : entries_) {
    restore_buffer(entry.slot, entry.tensor, entry.values);
  }
}

std::vector<at::Tensor> BufferValues::tensors() const {
  std::vector<at::Tensor> tensors;
  for (const Entry& entry : entries_) {
    if (entry.values.defined()) tensors.push_back(entry.tensor);
  }
  return tensors;
}

}  // namespace infinitybatch
