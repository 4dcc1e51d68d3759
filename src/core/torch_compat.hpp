#pragma once

// Everything that is no public promise of LibTorch stands in this file, so that a new release is
// checked in one place. Checked by the whole test suite on 2.13, by its Python part on
// 2.11 and 2.12.

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <utility>

/// Torch 2.11 lets a storage refuse to be read, and has no way to take that back.
#define INFINITYBATCH_TORCH_HIDES_ABSENCE (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12)

namespace infinitybatch::compat {

namespace detail {
template <typename Pointer>
struct Ownership;

// Up to 2.12 a graph node is owned by std::shared_ptr.
template <typename T>
struct Ownership<std::shared_ptr<T>> {
  template <typename N, typename... Args>
  static std::shared_ptr<N> make(Args&&... args) {
    return std::shared_ptr<N>(new N(std::forward<Args>(args)...),
                              [](T* node) { deleteNode(node); });  // found in torch::autograd
  }
  static std::weak_ptr<T> weak(const std::shared_ptr<T>& node) { return node; }
};

// From 2.13 on by c10::intrusive_ptr.
template <typename T>
struct Ownership<c10::intrusive_ptr<T>> {
  template <typename N, typename... Args>
  static c10::intrusive_ptr<N> make(Args&&... args) {
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
  }
  static c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& node) {
    return c10::weak_intrusive_ptr<T>(node);
  }
};

#if INFINITYBATCH_TORCH_HIDES_ABSENCE
/// The flag of a storage by which it refuses to be read. It is private, but arguments of an
/// explicit instantiation may name it.
bool& refuses_reads(c10::StorageImpl& storage);
template <bool c10::StorageImpl::* Flag>
struct Unhide {
  friend bool& refuses_reads(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct Unhide<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif
}  // namespace detail

/// How much a storage holds; 0 where its size is a symbol (torch.compile is tracing).
inline int64_t bytes_in(const c10::StorageImpl& storage) {
  const c10::SymInt& bytes = storage.sym_nbytes();
  return bytes.is_heap_allocated() ? 0 : bytes.as_int_unchecked();
}

/// The owning pointer to a graph node.
using NodePtr = decltype(torch::autograd::Edge::function);

/// A new graph node, owned as this release of torch owns them.
template <typename N, typename... Args>
auto make_node(Args&&... args) {
  return detail::Ownership<NodePtr>::template make<N>(std::forward<Args>(args)...);
}

/// Where gradients of the leaf `variable` go: its gradient accumulator, null where none lives.
inline NodePtr accumulator_of(const at::Tensor& variable) {
  return torch::autograd::impl::try_get_grad_accumulator(variable);
}

/// Sends gradients of the leaf `variable` to `node` in graphs that are built from now on. The slot
/// is weak: the caller keeps `node` alive. A null node lets torch make a new accumulator.
inline void set_accumulator(const at::Tensor& variable, const NodePtr& node) {
  torch::autograd::impl::set_grad_accumulator(variable, detail::Ownership<NodePtr>::weak(node));
}

/// Lets the history of `tensor` begin at `start`, a leaf or what was made of one: gradients go
/// there.
inline void begin_history(const at::Tensor& tensor, const at::Tensor& start) {
  torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::impl::gradient_edge(start));
}

/// Makes the version of the memory of `tensor` this one, as torch's `_unsafe_set_version_counter`
/// does.
inline void set_version(const at::Tensor& tensor, uint32_t version) {
  c10::VariableVersion counter = tensor.unsafeGetTensorImpl()->version_counter();
  counter.set_version(version);
}

/// Adds `gradient` to `buffer` as torch's own accumulator does: the first one is taken over without
/// a copy where nobody else holds it, later ones are added in place.
/// \param references how many references to `gradient` the caller itself holds
inline void accumulate(const at::Tensor& variable, at::Tensor& buffer, const at::Tensor& gradient,
                       size_t references) {
  torch::autograd::AccumulateGrad::accumulateGrad(
      variable, buffer, gradient, references,
      [&buffer](at::Tensor&& sum) { buffer = std::move(sum); });
}

/// From now on whoever reads the memory of `storage`, which has none for a while, is told
/// `message`.
inline void announce_absence(c10::StorageImpl& storage, const char* message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

/// Takes `announce_absence` back.
inline void end_absence(c10::StorageImpl& storage) {
#if INFINITYBATCH_TORCH_HIDES_ABSENCE
  detail::refuses_reads(storage) = false;
#else
  storage.clear_data_ptr_access_error_msg_();
#endif
}

/// How many references Python holds to the object by which it knows a tensor or a storage.
/// \param slot of something that has an owner besides that object: torch counts as one reference
/// then
template <typename Slot>
size_t python_references(const Slot& slot) {
  PyObject* object = slot.load_pyobj();
  if (object == nullptr) return 0;
  size_t all = 0;
  if constexpr (requires { slot.load_pyobj_interpreter(); }) {  // up to 2.12
    all = slot.load_pyobj_interpreter()->refcnt(object);
  } else {
    all = (*c10::impl::getGlobalPyInterpreter())->refcnt(object);
  }
  return all - (all > 0 ? 1 : 0);
}

}  // namespace infinitybatch::compat
