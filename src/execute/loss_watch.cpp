#include "execute/loss_watch.hpp"

#include "core/tensor_parts.hpp"

#include <ATen/core/ivalue.h>

#include <utility>

namespace infinitybatch {
namespace {

template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) visit(*tensor);
    }
  }
}

}  // namespace

LossWatch::LossWatch(const std::vector<at::Tensor>& watched, std::function<void(size_t)> write,
                     std::function<void(const at::Tensor&)> read)
    : write_(std::move(write)), read_(std::move(read)), listening_(*this) {
  for (size_t i = 0; i < watched.size(); ++i) {
    for (const c10::StorageImpl* storage : storages_of(watched[i])) unwritten_.emplace(storage, i);
  }
}

std::unique_ptr<tape::OpContext> LossWatch::begin(const tape::SeenOp& op) noexcept {
  errors_.guard([&] { meet(op); });
  return nullptr;
}

void LossWatch::meet(const tape::SeenOp& op) {
  for (const c10::IValue& input : op.inputs()) {
    for_each_tensor(input, [this](const at::Tensor& tensor) { meet_read(tensor); });
  }
  if (unwritten_.empty()) return;
  const tape::OpFacts* facts = op.facts();
  if (facts == nullptr || !facts->writes) return;
  const auto inputs = op.inputs();
  for (size_t i = 0; i < inputs.size() && i < facts->written.size(); ++i) {
    if (!facts->written[i]) continue;
    for_each_tensor(inputs[i], [this](const at::Tensor& tensor) { meet_write(tensor); });
  }
}

void LossWatch::meet_read(const at::Tensor& tensor) {
  if (tensor.defined() && !errors_.any()) errors_.guard([&] { read_(tensor); });
}

void LossWatch::meet_write(const at::Tensor& tensor) {
  for (const c10::StorageImpl* storage : storages_of(tensor)) {
    const auto [begin, end] = unwritten_.equal_range(storage);
    std::vector<size_t> written;
    for (auto each = begin; each != end; ++each) written.push_back(each->second);
    unwritten_.erase(storage);
    for (const size_t index : written) errors_.guard([&] { write_(index); });
  }
}

}  // namespace infinitybatch
