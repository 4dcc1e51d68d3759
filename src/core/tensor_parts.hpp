#pragma once

#include "core/tensor_memory.hpp"

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <optional>
#include <vector>

namespace infinitybatch {

/// Whether a tensor is its memory, seen by sizes and strides, a number an element.
bool is_plain(const at::Tensor& tensor);

/// Whether all of it is in the one storage that it has: a plain one, or one of quantized numbers.
bool has_one_storage(const at::Tensor& tensor);

/// The plain tensors whose memory is that of another tensor, of any kind.
struct TensorParts {
  /// A plain one itself; indices and values of a sparse one; buffer and sizes of a nested one; the
  /// integers of a quantized one; what a subclass wraps.
  c10::SmallVector<at::Tensor, 3> tensors;
  /// Whether it has no memory beside them. What MKL-DNN keeps, or a subclass that does not tell
  /// what it wraps, nobody knows.
  bool complete = true;
};

/// No operator runs: it may be asked while one is watched.
TensorParts parts_of(const at::Tensor& tensor);

/// The storages of all parts; of a plain one its own. Undefined tensors have none.
using TensorStorages = c10::SmallVector<c10::StorageImpl*, 3>;
TensorStorages storages_of(const at::Tensor& tensor);

/// What a subclass of tensors wraps, as a binding knows it; nothing where nobody can tell. For
/// bindings; call it at load time.
using WrappedTensors = std::function<std::optional<std::vector<at::Tensor>>(const at::Tensor&)>;
void register_wrapped_tensors(WrappedTensors wrapped);

}  // namespace infinitybatch
