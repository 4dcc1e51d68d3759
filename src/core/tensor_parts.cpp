#include "core/tensor_parts.hpp"

#include <ATen/Functions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace infinitybatch {
namespace {

constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Fake,
                                         c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Functionalize});

WrappedTensors& wrapped_tensors() {
  static WrappedTensors of_binding;
  return of_binding;
}

/// Quantized numbers as the integers that they are stored as.
at::Tensor integers_of(const at::Tensor& tensor) {
  const auto [type, per_integer] = [&]() -> std::pair<at::ScalarType, int64_t> {
    switch (tensor.scalar_type()) {
      case at::kQInt8:
        return {at::kChar, 1};
      case at::kQUInt8:
        return {at::kByte, 1};
      case at::kQInt32:
        return {at::kInt, 1};
      default:
        return {at::kByte, 0};  // several in a byte
    }
  }();
  const at::RecordFunctionGuard unseen(false);
  const at::NoGradGuard no_grad;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  at::Tensor empty = at::empty({0}, at::TensorOptions(type).device(tensor.device()));
  if (per_integer == 0)
    return empty.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  return empty.set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

void add_parts(const at::Tensor& tensor, TensorParts& parts);

void add_compressed(const at::Tensor& tensor, TensorParts& parts) {
  const auto* impl = at::sparse_csr::get_sparse_csr_impl(tensor);
  for (const at::Tensor& part :
       {impl->compressed_indices(), impl->plain_indices(), impl->values()}) {
    add_parts(part, parts);
  }
}

void add_nested(const at::Tensor& tensor, TensorParts& parts) {
  const auto* impl = at::native::get_nested_tensor_impl(tensor);
  for (const at::Tensor& part : {impl->get_unsafe_storage_as_tensor(), impl->get_nested_sizes(),
                                 impl->get_nested_strides(), impl->get_storage_offsets()}) {
    add_parts(part, parts);
  }
}

void add_wrapped(const at::Tensor& tensor, TensorParts& parts) {
  std::optional<std::vector<at::Tensor>> inner;
  if (wrapped_tensors() && tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    inner = wrapped_tensors()(tensor);
  }
  parts.complete = parts.complete && inner.has_value();
  if (!inner) return;
  for (const at::Tensor& each : *inner) add_parts(each, parts);
}

void add_parts(const at::Tensor& tensor, TensorParts& parts) {
  if (!tensor.defined()) return;
  if (is_plain(tensor)) {
    parts.tensors.push_back(tensor);
  } else if (tensor.key_set().has_any(kWrappers)) {
    add_wrapped(tensor, parts);
  } else if (tensor.is_nested()) {
    add_nested(tensor, parts);
  } else if (tensor.is_sparse()) {
    const auto* impl = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    add_parts(impl->indices(), parts);
    add_parts(impl->values(), parts);
  } else if (at::sparse_csr::is_sparse_compressed(tensor)) {
    add_compressed(tensor, parts);
  } else if (has_one_storage(tensor)) {
    parts.tensors.push_back(integers_of(tensor));
  } else {
    parts.complete = false;
  }
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers =
      kWrappers | c10::DispatchKeySet(c10::DispatchKey::NestedTensor);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !impl.key_set().has_any(kOthers);
}

bool has_one_storage(const at::Tensor& tensor) {
  return is_plain(tensor) ||
         (tensor.is_quantized() && tensor.has_storage() && !tensor.key_set().has_any(kWrappers));
}

TensorParts parts_of(const at::Tensor& tensor) {
  TensorParts parts;
  add_parts(tensor, parts);
  return parts;
}

TensorStorages storages_of(const at::Tensor& tensor) {
  TensorStorages storages;
  const auto add = [&](const at::Tensor& part) {
    c10::StorageImpl* storage = part.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (storage != nullptr) storages.push_back(storage);
  };
  if (!tensor.defined()) return storages;
  if (has_one_storage(tensor)) {
    add(tensor);
    return storages;
  }
  for (const at::Tensor& part : parts_of(tensor).tensors) add(part);
  return storages;
}

void register_wrapped_tensors(WrappedTensors wrapped) {
  wrapped_tensors() = std::move(wrapped);
}

}  // namespace infinitybatch
