#include <infinitybatch/execute/loss_watch.hpp>

#include <infinitybatch/tape/op_facts.hpp>

#include <ATen/core/ivalue.h>

#include <string_view>
#include <utility>

namespace infinitybatch {
namespace {

thread_local LossWatch* innermost = nullptr;

}  // namespace

bool is_collective(std::string_view name) {
  return name.starts_with("c10d::") || name.starts_with("_c10d_functional::");
}

LossWatch::LossWatch(const std::vector<at::Tensor>& watched, std::function<void(size_t)> write)
    : write_(std::move(write)),
      outer_(innermost),
      handle_(
          at::addThreadLocalCallback(at::RecordFunctionCallback(&on_op).needsInputs(true).scopes(
              {at::RecordScope::FUNCTION}))) {
  for (size_t i = 0; i < watched.size(); ++i) {
    if (!watched[i].defined() || !watched[i].has_storage()) continue;
    unwritten_.emplace(watched[i].storage().unsafeGetStorageImpl(), i);
  }
  innermost = this;
}

LossWatch::~LossWatch() {
  at::removeCallback(handle_);
  innermost = outer_;
}

std::unique_ptr<at::ObserverContext> LossWatch::on_op(const at::RecordFunction& op) {
  if (innermost != nullptr) innermost->meet(op);
  return nullptr;
}

void LossWatch::meet(const at::RecordFunction& op) {
  if (!collective_ && is_collective(op.name())) collective_ = op.name();
  if (unwritten_.empty()) return;
  const tape::OpFacts* facts = tape::facts_of(op);
  if (facts == nullptr || !facts->writes) return;
  const auto inputs = op.inputs();
  for (size_t i = 0; i < inputs.size() && i < facts->written.size(); ++i) {
    if (!facts->written[i]) continue;
    if (inputs[i].isTensor()) {
      meet_write(inputs[i].toTensor());
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) meet_write(tensor);
    }
  }
}

void LossWatch::meet_write(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto [begin, end] = unwritten_.equal_range(storage);
  std::vector<size_t> written;
  for (auto each = begin; each != end; ++each) written.push_back(each->second);
  unwritten_.erase(storage);
  try {
    for (const size_t index : written) write_(index);
  } catch (...) {
    if (!failed_) failed_ = std::current_exception();
  }
}

}  // namespace infinitybatch
