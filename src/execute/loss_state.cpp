#include "execute/loss_state.hpp"

#include "core/tensor_memory.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace infinitybatch {
namespace {

constexpr int64_t kMostLossBytes = int64_t{256} << 20;

}  // namespace

LossState* LossState::at_work() noexcept {
  return ThreadContext::get().loss_state;
}

void LossState::before(const std::function<PlainState()>& look) {
  if (begun_) return;
  begun_ = true;
  state_ = look();
  std::unordered_set<const c10::StorageImpl*> seen;
  int64_t total = 0;
  c10::SmallVector<at::Tensor, 8> tensors;
  for (NamedParameter& each : state_.tensors) {
    for (at::Tensor& part : parts_of(each.tensor).tensors) tensors.push_back(std::move(part));
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_meta()) continue;
    const c10::Storage& storage = tensor.storage();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (bytes == 0 || !seen.insert(storage.unsafeGetStorageImpl()).second) continue;
    Kept kept{tensor, version_of(tensor), {}, {}};
    total += bytes;
    if (total <= kMostLossBytes && tensor.is_cpu()) {
      const char* data = static_cast<const char*>(storage.data());
      kept.bytes.assign(data, data + bytes);
    } else if (total <= kMostLossBytes) {
      const at::NoGradGuard no_grad;
      kept.copy = value_of(tensor);
    }
    kept_.push_back(std::move(kept));
  }
  state_.tensors.clear();
}

void LossState::roll_back() {
  if (!begun_) return;
  begun_ = false;
  const PlainState state = std::exchange(state_, {});
  const std::vector<Kept> all = std::exchange(kept_, {});
  state.restore();
  std::string advanced;
  if (state.changed()) {
    for (const PlainNumber& each : state.numbers()) {
      if (!each.put_back) advanced = each.name;
    }
  }
  const at::NoGradGuard no_grad;
  bool lost = false;
  for (const Kept& kept : all) {
    const c10::Storage& storage = kept.tensor.storage();
    if (kept.bytes.size() == storage.nbytes() && !kept.bytes.empty()) {
      if (std::memcmp(storage.data(), kept.bytes.data(), kept.bytes.size()) != 0) {
        std::memcpy(storage.mutable_data(), kept.bytes.data(), kept.bytes.size());
      }
    } else if (kept.copy.defined()) {
      std::ignore = put_back(kept.tensor, kept.copy);  // plain ones all can
    } else {
      lost = lost || version_of(kept.tensor) != kept.version;
    }
  }
  if (lost) {
    throw Unsupported(
        "the step has to begin again, and its loss has written more than 256 MiB of tensors that "
        "it keeps between calls, which nobody has kept a copy of; give micro_batch_size, so that "
        "the loss is computed once");
  }
  if (!advanced.empty()) {
    throw Unsupported("the step has to begin again, and its loss has advanced '" + advanced +
                      "', a generator or iterator that Python cannot copy; give "
                      "micro_batch_size, so that the loss is computed once");
  }
}

}  // namespace infinitybatch
