#include "core/host_number.hpp"

#include <c10/core/DispatchKeySet.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace infinitybatch {
namespace {

/// Whether the tensor is nothing but memory of the host, whatever autograd or autocast do with it.
bool lies_on_host(const at::Tensor& tensor) {
  static const c10::DispatchKeySet ordinary =
      c10::DispatchKeySet(c10::DispatchKey::CPU) |
      c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::CPUBit) |
      c10::getAutocastRelatedKeySetFromBackend(c10::BackendComponent::CPUBit);
  return (tensor.key_set() | ordinary) == ordinary;
}

template <typename T>
double number_at(const at::Tensor& tensor) {
  return static_cast<double>(*static_cast<const T*>(tensor.const_data_ptr()));
}

}  // namespace

std::optional<double> host_number(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() != 0 || !lies_on_host(tensor)) return std::nullopt;
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return number_at<double>(tensor);
    case at::kFloat:
      return number_at<float>(tensor);
    case at::kHalf:
      return number_at<c10::Half>(tensor);
    case at::kBFloat16:
      return number_at<c10::BFloat16>(tensor);
    case at::kLong:
      return number_at<int64_t>(tensor);
    default:
      return std::nullopt;
  }
}

std::optional<int64_t> host_count_without(const at::Tensor& tensor, int64_t value) {
  if (!tensor.defined() || tensor.scalar_type() != at::kLong || !lies_on_host(tensor) ||
      !tensor.is_contiguous()) {
    return std::nullopt;
  }
  const int64_t* const numbers = tensor.const_data_ptr<int64_t>();
  return tensor.numel() - std::count(numbers, numbers + tensor.numel(), value);
}

}  // namespace infinitybatch
