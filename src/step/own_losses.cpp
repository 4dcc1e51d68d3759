#include "step/own_losses.hpp"

#include "core/tensor_parts.hpp"

#include <ATen/core/Reduction.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <string_view>

namespace infinitybatch {
namespace {

constexpr size_t kReduction = 3;  // of the arguments of nll_loss_forward

struct Expected : tape::OpContext {
  explicit Expected(OwnLoss::Kind is) : kind(is) {}
  OwnLoss::Kind kind;
};

/// Every cross entropy ends in one of these.
bool is_cross_entropy(std::string_view name) {
  return name == "aten::nll_loss_forward" || name == "aten::nll_loss2d_forward";
}

}  // namespace

void OwnLosses::watch(const Batch& inputs) {
  given_.clear();
  for (const at::Tensor& tensor : inputs.tensors()) {
    if (tensor.dim() == 0 && is_plain(tensor)) given_.push_back(tensor);
  }
}

bool OwnLosses::is_given(const at::Tensor& number) const {
  return is_plain(number) && std::any_of(given_.begin(), given_.end(), [&](const at::Tensor& each) {
           return each.is_alias_of(number);
         });
}

const OwnLoss* OwnLosses::find(const at::Tensor& tensor) const {
  if (tensor.dim() > 0 || !is_plain(tensor) || tensor.is_neg()) return nullptr;
  const auto found = std::find_if(found_.begin(), found_.end(), [&](const Found& each) {
    return each.loss._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
           each.version == version_of(tensor);
  });
  return found == found_.end() ? nullptr : &found->what;
}

std::unique_ptr<tape::OpContext> OwnLosses::begin(const tape::SeenOp& op) noexcept {
  const std::string_view name = op.name();
  std::unique_ptr<tape::OpContext> context;
  if (is_cross_entropy(name)) {
    errors_.guard([&] {
      const int64_t reduction = op.inputs().at(kReduction).toInt();
      if (reduction == at::Reduction::Mean) {
        context = std::make_unique<Expected>(OwnLoss::Kind::mean);
      } else if (reduction == at::Reduction::Sum) {
        context = std::make_unique<Expected>(OwnLoss::Kind::sum);
      }
    });
  } else if (!found_.empty() && name == "aten::div") {
    errors_.guard([&] {
      const auto inputs = op.inputs();
      if (inputs.size() != 2 || !inputs[0].isTensor() || !inputs[1].isTensor()) return;
      const OwnLoss* sum = find(inputs[0].toTensor());
      if (sum == nullptr || sum->kind != OwnLoss::Kind::sum) return;
      if (is_given(inputs[1].toTensor())) context = std::make_unique<Expected>(sum->kind);
    });
  }
  return context;
}

void OwnLosses::end(const tape::SeenOp& op, tape::OpContext* context) noexcept {
  if (context == nullptr) return;
  errors_.guard([&] {
    const std::vector<c10::IValue>& outputs = op.outputs();
    OwnLoss what{static_cast<Expected*>(context)->kind, {}};
    if (what.kind == OwnLoss::Kind::mean) what.weight = outputs.at(1).toTensor();
    const at::Tensor loss = outputs.at(0).toTensor();
    if (!is_plain(loss)) return;
    const c10::Storage& storage = loss.storage();
    found_.push_back({storage.getWeakStorageImpl(), version_of(loss), std::move(what)});
  });
}

std::vector<OwnLoss> OwnLosses::of(const Batch& outputs) {
  errors_.rethrow();
  std::vector<OwnLoss> losses;
  for (const Leaf& leaf : outputs.leaves()) {
    const OwnLoss* found = leaf.tensor.defined() ? find(leaf.tensor) : nullptr;
    losses.push_back(found == nullptr ? OwnLoss() : *found);
  }
  return losses;
}

}  // namespace infinitybatch
