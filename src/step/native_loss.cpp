#include "step/native_loss.hpp"

#include "execute/denominator.hpp"
#include "step/admission.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

namespace infinitybatch {

at::Tensor native_loss(const Loss& loss, const std::optional<CoupledLoss>& given, at::Device device,
                       int64_t rows, const Batch& outputs, const Batch& targets) {
  if (given) return given->value(outputs, targets);
  if (const auto* coupled = std::get_if<CoupledLoss>(&loss))
    return coupled->value(outputs, targets);
  const SeparableLoss& separable = std::get<SeparableLoss>(loss);
  const BatchSource source = targets_source(targets, rows, loss);
  Problem whole;
  whole.loss = separable;
  whole.inputs = &source;
  whole.targets = &source;
  whole.device = device;
  const at::Tensor value = Denominator(whole).divide(separable.sum(outputs, targets));
  return separable.has_penalty() ? value + separable.penalty().to(value.scalar_type()) : value;
}

}  // namespace infinitybatch
