#include <infinitybatch/core/bits.hpp>

#include <ATen/Functions.h>

namespace infinitybatch {

bool same_form(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

at::Tensor any_bit_differs(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.contiguous().reshape({-1}).view(at::kByte);
  };
  return at::ne(bytes(a), bytes(b)).any();
}

}  // namespace infinitybatch
