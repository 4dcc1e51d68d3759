#include "execute/loss_total.hpp"

#include "core/host_number.hpp"
#include "core/sum_type.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace infinitybatch {

void LossTotal::add(const at::Tensor& share) {
  if (!type_) type_ = share.scalar_type();
  if (device_.is_cpu()) {
    if (const std::optional<double> number = host_number(share)) {
      number_ += *number;
      return;
    }
  }
  const at::NoGradGuard no_grad;
  if (!tensor_.defined()) {
    tensor_ = at::zeros({}, at::TensorOptions().dtype(sum_type(device_)).device(device_));
  }
  // A model over several devices may have its outputs, and so its loss, elsewhere.
  tensor_.add_(share.detach().to(device_, /*non_blocking=*/!device_.is_cpu()));
}

at::Tensor LossTotal::get() const {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = type_.value_or(at::kFloat);
  if (tensor_.defined()) return tensor_.add(number_).to(type);
  return at::scalar_tensor(number_, at::TensorOptions().dtype(type).device(device_));
}

}  // namespace infinitybatch
