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
    for (size_t i = 0; i < part.outputs.leaves().size(); ++i) {
      if (!part.waiting.contains(output(i))) continue;
      part.outputs.leaves()[i].tensor = part.waiting.at(output(i));
      part.waiting.erase(output(i));
    }
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
  at::Tensor loss = compute(sinks);
  if (parks()) disperse();
  return loss;
}

/// Each micro-batch's share waits for itself, so that it comes back alone.
void WholeOutputs::disperse() {
  const at::NoGradGuard no_grad;
  for (auto& [begin, part] : parts_) {
    for (size_t i = 0; i < whole_.leaves().size(); ++i) {
      const Leaf& leaf = whole_.leaves()[i];
      if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
      const auto share = [&, first = part.rows.begin](const at::Tensor& whole) {
        return whole.narrow(leaf.batch_dim, first, part.rows.size()).clone();
      };
      // Somebody holds the whole all the while.
      if (!job_.keep_outputs) part.waiting[output(i)] = share(leaf.tensor);
      if (gradients_[i].defined()) part.waiting[gradient(i)] = share(gradients_[i]);
    }
    part.waiting.park(*job_.store);
  }
  for (size_t i = 0; i < whole_.leaves().size(); ++i) {
    Leaf& leaf = whole_.leaves()[i];
    if (leaf.batch_dim == Leaf::kShared) continue;
    gradients_[i].reset();
    if (!job_.keep_outputs) leaf.tensor.reset();
  }
  dispersed_ = true;
}

WaitingRoom& WholeOutputs::settled(Part& part) {
  for (size_t i = 0; i < part.outputs.leaves().size(); ++i) {
    const at::Tensor tensor = std::exchange(part.outputs.leaves()[i].tensor, at::Tensor());
    if (!tensor.defined()) continue;
    // A callback may have kept it: then its memory must stay.
    const bool alone = tensor.use_count() == 1;
    part.waiting[output(i)] = alone ? tensor : tensor.detach();
  }
  return part.waiting;
}

int64_t WholeOutputs::leave(Rows rows) {
  return parks() ? settled(parts_.at(rows.begin)).start_leaving(*job_.store) : 0;
}

int64_t WholeOutputs::park(Rows rows) {
  return parks() ? settled(parts_.at(rows.begin)).park(*job_.store) : 0;
}

int64_t WholeOutputs::fetch(Rows rows, bool ahead) {
  if (!parks()) return 0;
  std::set<tape::Crossing> all;
  Part& part = parts_.at(rows.begin);
  for (size_t i = 0; i < part.wants_gradient.size(); ++i) {
    all.insert(output(i));
    all.insert(gradient(i));
  }
  return part.waiting.fetch(all, ahead);
}

void WholeOutputs::forget(Rows rows) {
  if (parks()) parts_.at(rows.begin).waiting = WaitingRoom();
}

at::Tensor WholeOutputs::compute(autograd::GradientSinks& sinks) {
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

at::Tensor WholeOutputs::gradient(Rows rows, size_t leaf, at::Device device) {
  if (WaitingRoom& waiting = parts_.at(rows.begin).waiting; waiting.contains(gradient(leaf))) {
    return waiting.at(gradient(leaf));
  }
  if (leaf >= gradients_.size() || !gradients_[leaf].defined()) return {};
  const int64_t dim = whole_.leaves()[leaf].batch_dim;
  const at::Tensor gradient = dim == Leaf::kShared
                                  ? gradients_[leaf]
                                  : gradients_[leaf].narrow(dim, rows.begin, rows.size());
  return gradient.to(device);
}

Batch WholeOutputs::seen(Part& part) {
  const bool joined = whole_.structure() != nullptr;
  if (joined && (!dispersed_ || job_.keep_outputs)) {
    return infinitybatch::rows(whole_, part.rows.begin, part.rows.end);
  }
  Batch seen = joined ? whole_ : part.outputs;
  for (size_t i = 0; i < seen.leaves().size(); ++i) {
    if (part.waiting.contains(output(i))) seen.leaves()[i].tensor = part.waiting.at(output(i));
  }
  return seen;
}

void WholeOutputs::compare(Rows rows, const Batch& outputs) {
  const at::NoGradGuard no_grad;
  const Batch seen = this->seen(parts_.at(rows.begin));
  if (!differs_.defined()) {
    differs_ = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(device()));
  }
  note_differences(seen, outputs, differs_);
}

bool WholeOutputs::differ() const {
  return differs_.defined() && differs_.item<bool>();
}

}  // namespace infinitybatch
