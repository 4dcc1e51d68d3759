#include "core/transforms.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/FuncTorchTLS.h>
#include <ATen/functorch/DynamicLayer.h>

namespace infinitybatch {
namespace {

using at::functorch::TransformType;

const char* name_of(TransformType transform) {
  switch (transform) {
    case TransformType::Grad:
      return "a derivative of torch.func (grad, vjp, jacrev)";
    case TransformType::Jvp:
      return "torch.func.jvp (or jacfwd)";
    case TransformType::Vmap:
      return "torch.func.vmap";
    case TransformType::Functionalize:
      return "torch.func.functionalize";
    default:
      return "a transform of torch.func";
  }
}

}  // namespace

void refuse_transforms() {
  // Asking for the layers of a thread that never had one makes a list of them, which each node of
  // each later backward pass would copy with the thread's state.
  if (at::functorch::functorchTLSAccessor() == nullptr) return;
  const auto layer = at::functorch::maybeCurrentDynamicLayer();
  if (!layer) return;
  const bool derivative = layer->key() == TransformType::Grad;
  throw Unsupported(std::string(name_of(layer->key())) +
                    " is at work, which sees nothing of what is computed micro-batch by "
                    "micro-batch; " +
                    (derivative ? "take the gradient with torch.autograd.grad or backward()"
                                : "call the model itself under it, without infinitybatch"));
}

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

void refuse_tangent(const std::string& name, const at::Tensor& tensor) {
  if (!has_tangent(tensor)) return;
  throw Unsupported(name +
                    " carries a tangent of forward-mode AD, which would be lost: micro-batches "
                    "give gradients only; call the model itself there, without infinitybatch, or "
                    "unpack the tensor with torch.autograd.forward_ad.unpack_dual");
}

void refuse_batched(const std::vector<at::Tensor>& gradients) {
  constexpr c10::DispatchKeySet kBatched{c10::DispatchKey::Batched,
                                         c10::DispatchKey::FuncTorchBatched};
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || !gradient.key_set().has_any(kBatched)) continue;
    throw Unsupported(
        "backward is given many gradients at once, by vmap (is_grads_batched=True, "
        "jacobian(vectorize=True)), which micro-batches cannot take; take one after the other, or "
        "call the model itself, without infinitybatch");
  }
}

}  // namespace infinitybatch
