#include "core/bits.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <limits>

namespace infinitybatch {

bool same_form(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.device() != b.device()) return false;
  // The sizes of these are numbers in tensors.
  const bool nested = a.is_nested() || b.is_nested();
  return nested ? a.is_nested() == b.is_nested() : a.sym_sizes() == b.sym_sizes();
}

void resize_to(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() != like.sizes()) tensor.resize_(like.sizes());
}

namespace {

double epsilon_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    default:
      return 0.0;  // the bits
  }
}

/// Kernels of accelerators that add by atomics (index_add, scatter_add, cumsum) round otherwise
/// each time they run, and what comes behind them too. More than this is no rounding. Nothing waits
/// for the device.
at::Tensor differs_beyond_atomics(const at::Tensor& a, const at::Tensor& b) {
  if (a.device().is_cpu() || !a.is_floating_point() || a.numel() == 0) return any_bit_differs(a, b);
  const double roundings = a.element_size() < 4 ? 2.0 : 32.0;
  const double epsilon = epsilon_of(a.scalar_type());
  const at::Tensor bound = a.abs().amax().nan_to_num(0.0, 0.0, 0.0).mul_(roundings * epsilon);
  at::Tensor near = a.sub(b).abs_().le(bound);
  near.logical_or_(a.eq(b));
  near.logical_or_(a.isnan().logical_and_(b.isnan()));
  return near.all().logical_not_();
}

template <typename Differs>
void note(const at::Tensor& before, const at::Tensor& now, at::Tensor& differs, Differs different) {
  if (!differs.defined()) {
    const at::Device device = before.is_meta() ? at::Device(at::kCPU) : before.device();
    differs = at::zeros({}, at::TensorOptions(at::kBool).device(device));
  }
  if (!same_form(before, now)) {
    differs.fill_(true);
  } else {
    // A model over several devices has its outputs elsewhere.
    differs.logical_or_(different(before, now).to(differs.device()));
  }
}

}  // namespace

void note_difference(const at::Tensor& before, const at::Tensor& now, at::Tensor& differs) {
  note(before, now, differs, any_bit_differs);
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
      note(left, right, differs, differs_beyond_atomics);
    } else {
      differs.fill_(true);
    }
  }
}

}  // namespace infinitybatch
