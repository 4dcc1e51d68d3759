#include <infinitybatch/core/bits.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace infinitybatch {

bool same_form(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

void resize_to(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() != like.sizes()) tensor.resize_(like.sizes());
}

at::Tensor any_bit_differs(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    // A single element counts as contiguous with any stride, which no view of bytes may have.
    const at::Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
    return plain.as_strided({plain.numel()}, {1}).view(at::kByte);
  };
  return at::ne(bytes(a), bytes(b)).any();
}

void note_difference(const at::Tensor& before, const at::Tensor& now, at::Tensor& differs) {
  if (!differs.defined()) {
    differs = at::zeros({}, before.options().dtype(at::kBool).requires_grad(false));
  }
  if (!same_form(before, now)) {
    differs.fill_(true);
  } else {
    // A model over several devices has its outputs elsewhere.
    differs.logical_or_(any_bit_differs(before, now).to(differs.device()));
  }
}

void note_differences(const Batch& before, const Batch& now, at::Tensor& differs) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < before.leaves().size(); ++i) {
    const at::Tensor& left = before.leaves()[i].tensor;
    if (!left.defined() || left.layout() != at::kStrided) continue;
    const at::Tensor right = i < now.leaves().size() && now.leaves()[i].tensor.defined()
                                 ? now.leaves()[i].tensor.detach().to(left.device())
                                 : at::Tensor();
    if (right.defined()) {
      note_difference(left, right, differs);
    } else {
      differs.fill_(true);
    }
  }
}

}  // namespace infinitybatch
