#include "tape/provenance.hpp"

#include "core/recycled.hpp"

#include <c10/core/DispatchKeySet.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace infinitybatch::tape {

namespace {

/// Tensor::_version without the call by way of autograd's table of hooks.
uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// What the new node of a stale view will lead to.
const void* base_history(const torch::autograd::AutogradMeta& view) {
  const auto& meta = static_cast<const torch::autograd::DifferentiableViewMeta&>(view);
  const at::Tensor& base = meta.get_backward_view().base_;
  const auto* base_meta = torch::autograd::impl::get_autograd_meta(base);
  if (base_meta != nullptr && base_meta->grad_fn_) return base_meta->grad_fn_.get();
  return base.unsafeGetTensorImpl();
}

}  // namespace

bool is_stale_view(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || !meta->is_view_ || tensor.is_inference()) return false;
  const auto* view = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
  return view->has_bw_view() && view->requires_grad() &&
         view->get_attr_version() != version_of(tensor);
}

torch::autograd::Node* standing_node(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr || is_stale_view(tensor) ? nullptr : meta->grad_fn_.get();
}

bool has_history(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && (meta->grad_fn_ != nullptr || is_stale_view(tensor));
}

Provenance Provenance::of(const at::Tensor& tensor) {
  Provenance here;
  here.storage = storage_of(tensor);
  // Inference tensors have no version.
  if (!tensor.is_inference()) here.version = version_of(tensor);
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return here;
  here.stale = is_stale_view(tensor);
  here.node = here.stale ? base_history(*meta) : meta->grad_fn_.get();
  here.output = meta->output_nr_;
  // A view asks its base as well.
  here.requires_grad =
      meta->is_view_ ? tensor.requires_grad() : meta->requires_grad_ || meta->grad_fn_;
  return here;
}

const char* Provenance::difference(const Provenance& now) const {
  if (storage != now.storage) return "its memory was exchanged (`.data =`, `set_`)";
  // Torch makes the node of a view anew when it is first used.
  const bool made_anew = stale && !now.stale && version == now.version;
  if (!made_anew && (node != now.node || output != now.output)) {
    return "its graph node was set by no recorded op (an autograd function)";
  }
  if (requires_grad != now.requires_grad) return "requires_grad was set on it";
  if (version != now.version) return "it was written outside of the recorded ops";
  return nullptr;
}

const char* strange(const at::Tensor& tensor) {
  static const c10::DispatchKeySet wrappers{
      c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize,
      c10::DispatchKey::FuncTorchBatchedDecomposition};
  const c10::DispatchKeySet found = tensor.key_set() & wrappers;
  if (found.empty()) return nullptr;
  return found.has(c10::DispatchKey::Python) ? "a tensor subclass" : "a functorch wrapper";
}

using NodeSet = ska::flat_hash_set<const torch::autograd::Node*,
                                   std::hash<const torch::autograd::Node*>, std::equal_to<>,
                                   std::pmr::polymorphic_allocator<const torch::autograd::Node*>>;

const char* hooked(const std::vector<at::Tensor>& roots,
                   const std::vector<compat::NodePtr>& inner) {
  Arena<(size_t{1} << 12)> arena;
  std::pmr::vector<torch::autograd::Node*> open(arena.resource());
  NodeSet seen(arena.resource());
  seen.reserve(64);  // enough for small forwards
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& root : roots) visit(root.grad_fn().get());
  for (const compat::NodePtr& node : inner) visit(node.get());
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    const char* why = nullptr;
    if (!node->tensor_pre_hooks().empty()) {
      why = "a hook was set on a tensor";
    } else if (!node->retains_grad_hooks().empty()) {
      why = "retain_grad() was called on a tensor";
    } else if (!node->pre_hooks().empty() || !node->post_hooks().empty()) {
      why = "a hook was set on a graph node";
    }
    // Leaves are met again by the replay; their hooks are the user's business as ever. Asked only
    // here: casts are slow.
    if (why != nullptr) {
      const bool is_inner = std::any_of(inner.begin(), inner.end(),
                                        [&](const auto& each) { return each.get() == node; });
      const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr;
      if (is_inner || !leaf) return why;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return nullptr;
}

}  // namespace infinitybatch::tape
