#pragma once

#include "core/tensor_memory.hpp"
#include "core/torch_compat.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <vector>

namespace infinitybatch::tape {

/// Where a tensor comes from, as far as it can be told by looking at it. If it differs between a
/// value's definition and its use, something happened in between that no dispatched op tells of: a
/// C++ autograd function, `requires_grad_()`, `set_data`, a write past the dispatcher.
struct Provenance {
  const void* node = nullptr;  // its grad_fn; of a stale view, its base's
  bool stale = false;          // a view whose memory was written since its own node was made
  uint32_t output = 0;
  bool requires_grad = false;
  const c10::StorageImpl* storage = nullptr;
  uint32_t version = 0;

  bool operator==(const Provenance&) const = default;

  static Provenance of(const at::Tensor& tensor);
  /// "its graph node was replaced": the first difference, for people.
  const char* difference(const Provenance& now) const;
};

/// Why no tape can tell what an op does with this tensor; null where it can.
const char* strange(const at::Tensor& tensor);

/// Whether torch would have to make its node anew: it is a view, and its memory was written through
/// another tensor, or without a graph. To ask for its `grad_fn` then may be an error that natively
/// nobody meets, and takes a lock under which ops run.
bool is_stale_view(const at::Tensor& tensor);

/// The node that stands there, without making one anew; null for a stale view.
torch::autograd::Node* standing_node(const at::Tensor& tensor);

/// Whether anything has a graph behind it.
bool has_history(const at::Tensor& tensor);

/// Hooks that user code set on nodes of the graph behind `roots`; null where there are none. Those
/// of leaves are left out.
/// \param inner nodes that are looked at as well, and are no leaves of the user's
const char* hooked(const std::vector<at::Tensor>& roots, const std::vector<compat::NodePtr>& inner);

}  // namespace infinitybatch::tape
