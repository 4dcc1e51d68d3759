#include "core/tensor_values.hpp"

#include "core/bits.hpp"
#include "core/tensor_parts.hpp"

#include <ATen/Functions.h>
#include <ATen/quantized/QTensorImpl.h>
#include <c10/core/GradMode.h>

namespace infinitybatch {
namespace {

at::Tensor any_plain_bit_differs(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    // A single element counts as contiguous with any stride, which no view of bytes may have.
    const at::Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
    return plain.as_strided({plain.numel()}, {1}).view(at::kByte);
  };
  return at::ne(bytes(a), bytes(b)).any();
}

/// Of `tensor` what lies in another place of `like`, of the same shape: once.
at::Tensor without_repeats(const at::Tensor& tensor, const at::Tensor& like) {
  at::Tensor once = tensor;
  for (int64_t dim = 0; dim < like.dim(); ++dim) {
    if (like.stride(dim) == 0 && like.size(dim) > 1) once = once.narrow(dim, 0, 1);
  }
  return once;
}

void put_back_plain(const at::Tensor& tensor, const at::Tensor& values) {
  resize_to(tensor, values);
  const at::Tensor alias = tensor.variable_data();
  without_repeats(alias, alias).copy_(without_repeats(values, alias));
}

bool fit(const TensorParts& to, const TensorParts& from) {
  if (!to.complete || !from.complete || to.tensors.size() != from.tensors.size()) return false;
  for (size_t i = 0; i < to.tensors.size(); ++i) {
    if (!same_form(to.tensors[i], from.tensors[i])) return false;
  }
  return true;
}

/// A subclass that answers operators itself.
bool is_wrapper(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

/// How integers stand for numbers.
bool same_scale(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_quantized()) return true;
  return at::get_qtensorimpl(a)->quantizer()->equalTo(at::get_qtensorimpl(b)->quantizer());
}

/// What the parts do not tell. The sizes of a nested tensor are among them.
bool same_facts(const at::Tensor& a, const at::Tensor& b) {
  if (is_wrapper(a) || a.is_nested()) return true;
  return a.sizes() == b.sizes() && (!a.is_sparse() || a.is_coalesced() == b.is_coalesced());
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.key_set().highestBackendKey() == b.key_set().highestBackendKey() &&
         a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.is_nested() == b.is_nested() && is_wrapper(a) == is_wrapper(b);
}

}  // namespace

bool has_repeats(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense())
    return false;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) return true;
  }
  return false;
}

at::Tensor value_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach();
  if (!has_repeats(values)) return values.clone();
  return without_repeats(values, values).clone().expand(values.sizes());
}

bool put_back(const at::Tensor& tensor, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (is_plain(tensor) && is_plain(values)) {
    put_back_plain(tensor, values);
    return true;
  }
  if (tensor.scalar_type() != values.scalar_type() && !values.is_quantized()) {
    return put_back(tensor, values.to(tensor.scalar_type()));
  }
  if (!same_kind(tensor, values)) return false;
  const TensorParts to = parts_of(tensor);
  const TensorParts from = parts_of(values);
  if (same_facts(tensor, values) && fit(to, from)) {
    for (size_t i = 0; i < to.tensors.size(); ++i) put_back_plain(to.tensors[i], from.tensors[i]);
    if (tensor.is_quantized()) {
      at::get_qtensorimpl(tensor)->set_quantizer_(at::get_qtensorimpl(values)->quantizer());
    }
    return true;
  }
  if (is_wrapper(tensor)) return false;
  at::Tensor(tensor).set_data(value_of(values));
  return true;
}

void put_back(const at::Tensor& memory, const at::Tensor& tensor, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor& to = is_plain(memory) ? memory : tensor;
  if (!put_back(to, values)) at::Tensor(to).copy_(values);
}

bool put_back_counted(const at::Tensor& tensor, const at::Tensor& values) {
  const bool done = put_back(tensor, values);
  if (done && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return done;
}

bool can_be_compared(const at::Tensor& tensor) {
  return is_plain(tensor) || tensor.is_mkldnn() || parts_of(tensor).complete;
}

at::Tensor any_bit_differs(const at::Tensor& a, const at::Tensor& b) {
  const auto answer = [&](bool differs) {
    return at::full({}, differs,
                    at::TensorOptions(at::kBool).device(a.is_meta() ? at::kCPU : a.device()));
  };
  if (is_plain(a) && is_plain(b)) return a.is_meta() ? answer(false) : any_plain_bit_differs(a, b);
  if (!same_kind(a, b)) return answer(true);
  if (a.is_mkldnn()) return any_plain_bit_differs(a.to_dense(), b.to_dense());
  const TensorParts left = parts_of(a);
  const TensorParts right = parts_of(b);
  if (!same_facts(a, b) || !same_scale(a, b) || !fit(left, right)) return answer(true);
  at::Tensor differs = answer(false);
  for (size_t i = 0; i < left.tensors.size(); ++i) {
    const at::Tensor found = any_bit_differs(left.tensors[i], right.tensors[i]);
    differs.logical_or_(found.to(differs.device()));
  }
  return differs;
}

}  // namespace infinitybatch
