#include "step/wrap_seam.hpp"

#include "core/bits.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace infinitybatch {

WrapSeam::WrapSeam(const WrappedCall& call, const std::vector<at::Tensor>& gradients)
    : call_(call),
      gradients_(gradients),
      differs_(at::zeros({}, at::TensorOptions().dtype(at::kBool).device(call.device))),
      of_inputs_(call.wanted_inputs.size()) {}

at::Tensor WrapSeam::gradient(Rows rows, size_t leaf, const at::Tensor& output) const {
  const int number = leaf < call_.gradient_of_output.size() ? call_.gradient_of_output[leaf] : -1;
  if (number < 0) return {};
  const at::Tensor& gradient = gradients_[static_cast<size_t>(number)];
  if (!gradient.defined()) return {};
  at::Tensor here = call_.outputs.part_of_gradient(leaf, gradient, rows);
  if (!here.defined() || here.sizes() != output.sizes()) return {};
  return here.to(output.device(), output.scalar_type());
}

void WrapSeam::compare(Rows part, const Batch& numbers, const Batch& outputs) {
  note_differences(numbers, outputs, differs_);
  Batch seen = call_.outputs.whole;
  for (size_t i = 0; i < seen.leaves().size(); ++i) {
    Leaf& leaf = seen.leaves()[i];
    if (!leaf.tensor.defined()) continue;
    const bool reduced = leaf.batch_dim == Leaf::kShared && !call_.outputs.once[i];
    if (reduced || !call_.output_versions[i].holds()) leaf.tensor.reset();
  }
  note_differences(rows(seen, part.begin, part.end), outputs, differs_);
}

void WrapSeam::collect(Rows rows, const Batch& micro) {
  if (micro.leaves().empty()) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < of_inputs_.size(); ++i) {
    const size_t index = call_.wanted_inputs[i];
    const at::Tensor gradient = micro.leaves()[index].tensor.grad();
    if (!gradient.defined()) continue;
    const Leaf& whole = call_.inputs.leaves()[index];
    at::Tensor& sum = of_inputs_[i];
    if (!sum.defined()) sum = at::zeros_like(whole.tensor);
    const bool shared = whole.batch_dim == Leaf::kShared;
    (shared ? sum : sum.narrow(whole.batch_dim, rows.begin, rows.size()))
        .add_(gradient.to(sum.device()));
  }
}

Batch numbers_of(const Batch& outputs) {
  std::vector<Leaf> leaves = outputs.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined() && leaf.tensor.dim() > 0) leaf.tensor.reset();
  }
  return {std::move(leaves), outputs.structure()};
}

}  // namespace infinitybatch
