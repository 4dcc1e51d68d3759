#include <infinitybatch/execute/whole_outputs.hpp>

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/bits.hpp>
#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace infinitybatch {

std::vector<at::Tensor> stand_in_gradients(const Batch& outputs) {
  std::vector<at::Tensor> gradients;
  for (const Leaf& leaf : outputs.leaves()) {
    const bool wanted = leaf.tensor.defined() && leaf.tensor.requires_grad();
    gradients.push_back(wanted ? at::ones_like(leaf.tensor.detach(), at::MemoryFormat::Contiguous)
                               : at::Tensor());
  }
  return gradients;
}

at::Device WholeOutputs::device() const {
  return job_.coupled->device().value_or(job_.device);
}

const Batch& WholeOutputs::add(Rows rows, const Batch& outputs) {
  Part& part = parts_[rows.begin];
  part.rows = rows;
  part.wants_gradient.clear();
  std::vector<Leaf> leaves = outputs.leaves();
  for (Leaf& leaf : leaves) {
    part.wants_gradient.push_back(leaf.tensor.defined() && leaf.tensor.requires_grad());
    if (!leaf.tensor.defined()) continue;
    leaf.tensor = leaf.tensor.detach();
    if (device() != job_.device) leaf.tensor = leaf.tensor.to(device());
  }
  part.outputs = Batch(std::move(leaves), outputs.structure());
  return part.outputs;
}

void WholeOutputs::assemble() {
  const at::NoGradGuard no_grad;
  std::vector<Batch> outputs;
  std::vector<int64_t> row_counts;
  for (auto& [begin, part] : parts_) {
    outputs.push_back(std::exchange(part.outputs, Batch()));
    row_counts.push_back(part.rows.size());
    wants_gradient_.resize(part.wants_gradient.size(), false);
    for (size_t i = 0; i < wants_gradient_.size(); ++i) {
      wants_gradient_[i] = wants_gradient_[i] || part.wants_gradient[i];
    }
  }
  whole_ = concatenate(std::move(outputs), row_counts, "outputs");
}

at::Tensor WholeOutputs::loss(autograd::GradientSinks& sinks) {
  assemble();
  std::vector<Leaf> leaves = whole_.leaves();
  std::vector<at::Tensor> wanted;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!wants_gradient_[i]) continue;
    leaves[i].tensor = leaves[i].tensor.detach().requires_grad_();
    wanted.push_back(leaves[i].tensor);
  }
  const Batch targets = job_.targets->rows(0, job_.batch_size());
  const at::Tensor loss =
      job_.coupled->value({leaves, whole_.structure()}, to_device(targets, device()));
  if (!loss.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on anything that requires grad; check that the model's "
        "parameters require grad and that its outputs are not detached");
  }
  sinks.redirect_other_leaves({loss}, wanted);
  const at::Tensor gradient =
      job_.loss_scale.defined() ? job_.loss_scale.to(loss.device(), loss.scalar_type()).reshape({})
                                : at::ones_like(loss);
  autograd::run_backward({loss}, {gradient});
  for (size_t i = 0; i < leaves.size(); ++i) {
    gradients_.push_back(wants_gradient_[i] ? leaves[i].tensor.grad() : at::Tensor());
  }
  return loss.detach();
}

at::Tensor WholeOutputs::gradient(Rows rows, size_t leaf, at::Device device) const {
  if (leaf >= gradients_.size() || !gradients_[leaf].defined()) return {};
  const int64_t dim = whole_.leaves()[leaf].batch_dim;
  const at::Tensor gradient = dim == Leaf::kShared
                                  ? gradients_[leaf]
                                  : gradients_[leaf].narrow(dim, rows.begin, rows.size());
  return gradient.to(device);
}

void WholeOutputs::compare(Rows rows, const Batch& outputs) {
  const at::NoGradGuard no_grad;
  const Batch seen = whole_.structure() ? infinitybatch::rows(whole_, rows.begin, rows.end)
                                        : parts_.at(rows.begin).outputs;
  if (!differs_.defined()) {
    differs_ = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(device()));
  }
  note_differences(seen, outputs, differs_);
}

bool WholeOutputs::differ() const {
  return differs_.defined() && differs_.item<bool>();
}

}  // namespace infinitybatch
