#include "execute/whole_outputs.hpp"

#include "autograd/engine.hpp"
#include "core/bits.hpp"
#include "core/join.hpp"
#include "core/plain_leaves.hpp"
#include "core/sample_rows.hpp"
#include "core/torch_compat.hpp"
#include "coupled/row_errors.hpp"
#include "execute/carried_state.hpp"
#include "execute/findings.hpp"
#include "execute/loss_watch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <exception>
#include <set>
#include <utility>

namespace infinitybatch {

std::vector<at::Tensor> stand_in_gradients(const Batch& outputs) {
  refuse_sparse(outputs);
  std::vector<at::Tensor> gradients;
  for (const Leaf& leaf : outputs.leaves()) {
    const bool wanted = leaf.tensor.defined() && leaf.tensor.requires_grad();
    gradients.push_back(wanted ? at::ones_like(leaf.tensor.detach(), at::MemoryFormat::Contiguous)
                               : at::Tensor());
  }
  return gradients;
}

at::Device WholeOutputs::device() const {
  return problem_.loss.coupled() != nullptr
             ? problem_.loss.coupled()->device().value_or(problem_.device)
             : problem_.device;
}

const Batch& WholeOutputs::add(Rows rows, const Batch& outputs) {
  refuse_sparse(outputs);
  Part& part = parts_[rows.begin];
  part.rows = rows;
  part.wants_gradient.clear();
  shared_.meet(outputs, /*sure=*/rows.size() > 1 || rows.size() == problem_.batch_size());
  std::vector<Leaf> leaves = outputs.leaves();
  for (Leaf& leaf : leaves) {
    part.wants_gradient.push_back(leaf.tensor.defined() && leaf.tensor.requires_grad());
    if (!leaf.tensor.defined()) continue;
    leaf.tensor = leaf.tensor.detach();
    if (device() != problem_.device) leaf.tensor = leaf.tensor.to(device());
  }
  part.outputs = Batch(std::move(leaves), outputs.structure());
  return part.outputs;
}

void WholeOutputs::expect(const Batch& outputs) {
  expected_.clear();
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    const bool once = tensor.defined() && resources_.findings->output_law.leaves[i].once();
    expected_.push_back(once ? tensor.to(device()) : at::Tensor());
  }
}

void WholeOutputs::know_sources(std::vector<bool> from_samples, std::optional<std::string> why,
                                std::vector<Flattened> flattened) {
  from_samples_ = std::move(from_samples);
  why_ = std::move(why);
  flattened_ = std::move(flattened);
}

void WholeOutputs::find_law(const std::vector<Batch>& outputs,
                            const std::vector<int64_t>& row_counts) {
  if (from_samples_.empty()) return;
  size_t other = 0;
  while (other + 1 < outputs.size() && row_counts[other] == row_counts[0]) ++other;
  if (row_counts[other] == row_counts[0]) return;
  if (outputs[other].leaves().size() != from_samples_.size()) return;
  const OutputForm second{outputs[other], row_counts[other], from_samples_, why_};
  resources_.findings->output_law =
      find_output_law({outputs[0], row_counts[0], from_samples_, why_, flattened_}, &second);
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
  find_law(outputs, row_counts);
  const bool known = outputs.size() > 1 && resources_.findings->output_law.fits(outputs.front());
  check_plain_leaves(outputs, row_counts, /*other_sizes=*/known);
  whole_ = known ? join(std::move(outputs), row_counts, resources_.findings->output_law, expected_)
                 : concatenate(std::move(outputs), row_counts, "outputs");
  for (size_t i = 0; i < whole_.leaves().size(); ++i) {
    whole_.leaves()[i].tensor = whole_.leaves()[shared_.first_of(i)].tensor;
  }
  if (problem_.keep_outputs) left_ = whole_;
}

/// What the loss is given: no leaf itself, as natively, so that it may be changed in place. The
/// node in between takes hooks, which a leaf's own accumulator would not run for another tensor.
at::Tensor WholeOutputs::handed(const at::Tensor& output, std::vector<at::Tensor>& leaves) {
  const at::AutoGradMode grad_mode(true);
  leaves.push_back(output.detach().requires_grad_());
  const at::Tensor handed = output.detach();
  compat::begin_history(handed, at::alias(leaves.back()));
  return handed;
}

at::Tensor WholeOutputs::loss(autograd::GradientSinks& sinks) {
  assemble();
  at::Tensor loss = compute(sinks);
  if (offloads()) disperse();
  return loss;
}

/// Each micro-batch's share waits for itself, so that it comes back alone.
void WholeOutputs::disperse() {
  const at::NoGradGuard no_grad;
  for (auto& [begin, part] : parts_) {
    for (size_t i = 0; i < whole_.leaves().size(); ++i) {
      const Leaf& leaf = whole_.leaves()[i];
      if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
      const auto share = [&, rows = part.rows](const at::Tensor& whole) {
        const at::Tensor mine = rows_of(whole, leaf, rows);
        return mine.is_alias_of(whole) ? mine.clone() : mine;
      };
      // Somebody holds the whole all the while.
      if (!problem_.keep_outputs && part.compared) part.waiting[output(i)] = share(leaf.tensor);
      if (gradients_[i].defined()) part.waiting[gradient(i)] = share(gradients_[i]);
    }
    part.waiting.offload(*resources_.store);
  }
  for (size_t i = 0; i < whole_.leaves().size(); ++i) {
    Leaf& leaf = whole_.leaves()[i];
    if (leaf.batch_dim == Leaf::kShared) continue;
    gradients_[i].reset();
    if (!problem_.keep_outputs) leaf.tensor.reset();
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
  return offloads() ? settled(parts_.at(rows.begin)).start_leaving(*resources_.store) : 0;
}

int64_t WholeOutputs::offload(Rows rows) {
  return offloads() ? settled(parts_.at(rows.begin)).offload(*resources_.store) : 0;
}

int64_t WholeOutputs::fetch(Rows rows, bool ahead) {
  if (!offloads()) return 0;
  std::set<tape::Crossing> all;
  Part& part = parts_.at(rows.begin);
  for (size_t i = 0; i < part.wants_gradient.size(); ++i) {
    if (part.compared) all.insert(output(i));
    all.insert(gradient(i));
  }
  return part.waiting.fetch(all, ahead);
}

void WholeOutputs::forget(Rows rows) {
  if (offloads()) parts_.at(rows.begin).waiting = WaitingRoom();
}

/// Nodes are numbered as they are made, by each thread: forwards that ran in other threads are not
/// told apart. Tensors without a graph are known by the attribute that holds them.
void WholeOutputs::check_read(const at::Tensor& tensor, uint64_t loss_begins) const {
  if (parts_.size() < 2) return;
  const torch::autograd::Node* node =
      tensor.requires_grad() && !tensor.is_leaf() ? tensor.grad_fn().get() : nullptr;
  if (node != nullptr && node->sequence_nr() >= loss_begins) return;
  const bool of_forward = node != nullptr && node->sequence_nr() >= first_node_;
  const auto left = state_ == nullptr ? std::nullopt : state_->left().find(tensor);
  // Weights that each forward computes anew are the same for all samples.
  if (left ? !left->differs : !of_forward) return;
  const std::string what =
      left ? "'" + left->attribute + "', a tensor that forward left on the module,"
           : "a tensor that forward made and somebody kept (in a hook or a "
             "closure)";
  throw Unsupported(
      "the loss reads " + what + " and that is no output: each of the " +
      std::to_string(parts_.size()) +
      " micro-batches left its own, where the loss of the whole batch "
      "needs that of all samples. Return it as an output, with a row for each sample (or sum it in "
      "a "
      "loss that is separable, as losses.separable and losses.from_model do); compute it from all "
      "samples with across_batch; detach and ignore it; or make the budget large enough for one "
      "micro-batch");
}

/// Replays are compared with what the model gave.
void WholeOutputs::copy_before_write(size_t leaf) {
  if (shared_.overlaps(leaf)) {
    throw Unsupported("the loss writes outputs[" + std::to_string(leaf) +
                      "] in place, and another output lies in the same memory: natively both would "
                      "change. Write a copy of it (x = x.clone()), or return one of them and take "
                      "the other from it in the loss");
  }
  const at::NoGradGuard no_grad;
  at::Tensor& kept = whole_.leaves()[leaf].tensor;
  kept = kept.clone();
}

at::Tensor WholeOutputs::compute(autograd::GradientSinks& sinks) {
  const uint64_t loss_begins = at::sequence_number::peek();
  std::vector<Leaf> leaves = whole_.leaves();
  std::vector<at::Tensor> wanted;
  std::vector<at::Tensor> watched;
  for (size_t i = 0; i < leaves.size(); ++i) {
    at::Tensor& tensor = leaves[i].tensor;
    watched.push_back(tensor);
    if (shared_.first_of(i) != i) {
      tensor = leaves[shared_.first_of(i)].tensor;
    } else if (wants_gradient_[i]) {
      tensor = handed(tensor, wanted);
    }
  }
  bool reads_forward = false;  // its graph, past the outputs
  const auto read = [&](const at::Tensor& tensor) {
    check_read(tensor, loss_begins);
    const auto* node = tensor.requires_grad() ? tensor.grad_fn().get() : nullptr;
    if (node == nullptr) return;
    reads_forward =
        reads_forward || (node->sequence_nr() >= first_node_ && node->sequence_nr() < loss_begins);
  };
  const auto write = [this](size_t leaf) { copy_before_write(leaf); };
  LossWatch watch(watched, write, read);
  watched.clear();
  const Batch targets = problem_.targets->rows(0, problem_.batch_size());
  const at::Tensor loss =
      computed({std::move(leaves), whole_.structure()}, to_device(targets, device()), watch);
  read(loss);
  if (!loss.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on anything that requires grad; check that the model's "
        "parameters require grad and that its outputs are not detached");
  }
  sinks.redirect_other_leaves({loss}, wanted);
  const at::Tensor gradient =
      problem_.loss_scale.defined()
          ? problem_.loss_scale.to(loss.device(), loss.scalar_type()).reshape({})
          : at::ones_like(loss);
  // A graph that is kept for the outputs is gone through once more.
  autograd::run_backward({loss}, {gradient}, /*keep=*/reads_forward);
  auto leaf = wanted.begin();
  const OutputLaw& law = resources_.findings->output_law;
  for (size_t i = 0; i < wants_gradient_.size(); ++i) {
    const size_t first = shared_.first_of(i);  // has the gradient of all
    gradients_.push_back(wants_gradient_[i] && first == i ? (leaf++)->grad() : at::Tensor());
    read_.push_back(gradients_[first].defined());
    const bool compares = parts_.size() > 1 && law.fits(whole_) && law.leaves[i].compares;
    if (compares && gradients_[i].defined()) refuse_compared(whole_, i);
  }
  return loss.detach();
}

at::Tensor WholeOutputs::computed(const Batch& outputs, const Batch& targets, LossWatch& watch) {
  try {
    at::Tensor loss = problem_.loss.coupled()->value(outputs, targets);
    watch.rethrow();
    return loss;
  } catch (...) {
    if (coupled::may_be_of_rows(std::current_exception())) explain_compared();
    throw;
  }
}

/// Called with an error of the loss at work, which outputs may have caused that were joined along
/// one dimension and follow the samples along another one, too.
void WholeOutputs::explain_compared() const {
  const OutputLaw& law = resources_.findings->output_law;
  if (parts_.size() < 2 || !law.fits(whole_)) return;
  for (size_t i = 0; i < law.leaves.size(); ++i) {
    if (law.leaves[i].compares) std::throw_with_nested(compared(whole_, i));
  }
}

at::Tensor WholeOutputs::gradient(Rows rows, size_t leaf, at::Device device) {
  if (WaitingRoom& waiting = parts_.at(rows.begin).waiting; waiting.contains(gradient(leaf))) {
    return waiting.at(gradient(leaf));
  }
  if (leaf >= gradients_.size() || !gradients_[leaf].defined()) return {};
  const Leaf& like = whole_.leaves()[leaf];
  if (like.batch_dim != Leaf::kShared) return rows_of(gradients_[leaf], like, rows).to(device);
  // What stands once is computed by every micro-batch: one of them answers for it.
  return rows.begin == 0 ? gradients_[leaf].to(device) : at::Tensor();
}

Batch WholeOutputs::seen(Part& part) {
  const bool joined = whole_.structure() != nullptr;
  if (joined && (!dispersed_ || problem_.keep_outputs)) {
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
