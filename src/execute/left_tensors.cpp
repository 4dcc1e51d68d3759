#include "execute/left_tensors.hpp"

#include "core/extent.hpp"
#include "core/tensor_memory.hpp"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace infinitybatch {
namespace {

// As many values tell whether two tensors are the same.
constexpr int64_t kSampled = 1024;

/// Not those that a compiler traces with, which may have no numbers for sizes.
bool has_extent(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.layout() == at::kStrided && !tensor.is_nested() && storage_of(tensor) != nullptr &&
         !impl->is_python_dispatch() && !impl->has_symbolic_sizes_strides();
}

}  // namespace

at::Tensor sample_of(const at::Tensor& tensor) {
  if (tensor.is_quantized()) return {};
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);  // no op of the model's
  const at::Tensor values = tensor.detach();
  const int64_t step = std::max<int64_t>(1, values.numel() / kSampled);
  if (values.is_contiguous()) return values.view({-1}).slice(0, 0, values.numel(), step).clone();
  return values.numel() <= kSampled ? values.clone() : at::Tensor();
}

bool same_sample(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || a.sizes() != b.sizes() ||
      a.scalar_type() != b.scalar_type() || a.device() != b.device()) {
    return false;
  }
  const at::RecordFunctionGuard unseen(false);
  return at::equal(a, b);
}

bool LeftTensors::Place::differs() const {
  return later || (replaced && !same_sample(first, last));
}

void LeftTensors::add(const std::vector<NamedParameter>& tensors) {
  for (const NamedParameter& each : tensors) {
    if (!has_extent(each.tensor)) continue;
    const bool fresh = !places_.contains(each.name);
    Place& place = places_[each.name];
    place.memory = each.tensor.storage().getWeakStorageImpl();
    std::tie(place.begin, place.end) = extent_of(each.tensor);
    place.replaced = !fresh;
    place.later = place.later || (fresh && any_forward_);
    place.last = sample_of(each.tensor);
    if (fresh) place.first = place.last;
  }
  any_forward_ = true;
}

std::optional<LeftTensors::Left> LeftTensors::find(const at::Tensor& tensor) const {
  if (!tensor.defined() || !has_extent(tensor)) return std::nullopt;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto [begin, end] = extent_of(tensor);
  for (const auto& [name, place] : places_) {
    const bool inside = place.begin <= begin && end <= place.end;
    if (place.memory._unsafe_get_target() == storage && inside) return Left{name, place.differs()};
  }
  return std::nullopt;
}

}  // namespace infinitybatch
