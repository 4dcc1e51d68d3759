// The part of Executor that compares rows of a larger batch with the same rows of a smaller one.
#include <infinitybatch/execute/executor.hpp>

#include "light_recording.hpp"

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/pinned_copies.hpp>
#include <infinitybatch/coupled/fixed_ops.hpp>
#include <infinitybatch/execute/copied_batch.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

namespace {

/// \throws BatchError where pieces differ in another dimension, as rows padded to the longest do
Batch side_by_side(const std::vector<Batch>& pieces) {
  std::vector<Leaf> leaves = pieces.front().leaves();
  for (size_t i = 0; i < leaves.size() && pieces.size() > 1; ++i) {
    Leaf& leaf = leaves[i];
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    std::vector<at::Tensor> tensors;
    for (const Batch& piece : pieces) {
      const at::Tensor& here = piece.leaves().at(i).tensor;
      std::vector<int64_t> sizes = leaf.tensor.sizes().vec();
      if (here.dim() == leaf.tensor.dim()) {
        sizes[static_cast<size_t>(leaf.batch_dim)] = here.size(leaf.batch_dim);
      }
      if (here.sizes() != at::IntArrayRef(sizes)) throw BatchError("rows of other lengths");
      tensors.push_back(here);
    }
    leaf.tensor = at::cat(tensors, leaf.batch_dim);
  }
  return {std::move(leaves), pieces.front().structure()};
}

/// Rows of inputs that require grad have a graph, which leads to the whole's: forward of a
/// micro-batch finds leaves.
Batch as_leaves(const Batch& inputs) {
  std::vector<Leaf> leaves = inputs.leaves();
  for (Leaf& leaf : leaves) {
    if (!leaf.tensor.defined() || !leaf.tensor.requires_grad() || leaf.tensor.is_leaf()) continue;
    leaf.tensor = leaf.tensor.detach().set_requires_grad(true);
  }
  return {std::move(leaves), inputs.structure()};
}

}  // namespace

void Executor::note_read() {
  if (job_.rows_seen == nullptr || !read_.empty() || !share_.requires_grad()) return;
  // Micro-batches that are smaller than any so far are few.
  if (!job_.rows_seen->due(job_.batch_size(), smallest_)) return;
  std::map<const torch::autograd::Node*, std::vector<size_t>> leaves;
  read_.resize(outputs_.leaves().size(), false);
  for (size_t i = 0; i < read_.size(); ++i) {
    const at::Tensor& tensor = outputs_.leaves()[i].tensor;
    if (tensor.defined() && tensor.requires_grad()) leaves[tensor.grad_fn().get()].push_back(i);
  }
  autograd::walk_graph({share_}, [&](const torch::autograd::Node& node) {
    const auto found = leaves.find(&node);
    if (found == leaves.end()) return;
    for (const size_t leaf : found->second) read_[leaf] = true;
  });
}

std::optional<TrialOutputs> Executor::try_forward(const Batch& inputs, int64_t rows) {
  std::optional<TrialOutputs> tried;
  const auto run = [&](bool light) {
    aside(/*trial=*/true, [&] {
      inputs_ = as_leaves(wrote_inputs_ ? copied(inputs) : inputs);
      const std::vector<at::Device> devices = devices_of(job_);
      coupled::FixedOps fixed(devices, rows, watch_);
      const auto call = [&] {
        forward({0, rows});
        return std::exchange(outputs_, Batch());
      };
      Batch outputs;
      if (light) {
        tape::Recorder recorder(inputs_, {}, devices);
        recorder.lighten(job_.device);
        outputs = run_lightly(recorder, call);
      } else {
        outputs = call();
      }
      tried = TrialOutputs{detached(outputs), fixed.foreign(), fixed.strayed()};
    });
  };
  try {
    run(/*light=*/true);
  } catch (const Unsupported&) {  // forward asks for gradients itself
    run(/*light=*/false);
  }
  return tried;
}

std::optional<std::vector<at::Tensor>> Executor::try_gradients(const Batch& inputs, Rows rows,
                                                               const std::vector<int64_t>& dims,
                                                               const std::vector<bool>& compared) {
  std::optional<std::vector<at::Tensor>> gradients;
  aside(/*trial=*/true, [&] {
    inputs_ = as_leaves(wrote_inputs_ ? copied(inputs) : inputs);
    coupled::FixedOps fixed(devices_of(job_), rows.size(), watch_);
    const at::AutoGradMode recording(/*enabled=*/true);
    forward({0, rows.size()});
    const at::Tensor number = weighed(outputs_, dims, compared, rows);
    if (!number.defined() || fixed.stood_in()) return;
    std::vector<at::Tensor> found = gradients_by(job_.parameters, number);
    if (!fixed.strayed()) gradients = std::move(found);
  });
  return gradients;
}

void Executor::compare_rows() {
  if (job_.rows_seen == nullptr || !job_.exact_coupling || watch_.talked()) return;
  if (coupled::FixedOps::at_work()) return;  // this step is part of a forward that is looked at
  const int64_t rows = smallest_;
  if (rows == 0 || rows >= job_.batch_size()) return;
  // Rows of the user's own making are asked for again in first steps alone: they may be drawn.
  const bool whole = job_.outside != nullptr || keeps_rows(*job_.inputs);
  const bool due = whole || job_.rows_seen->steps == 0
                       ? job_.rows_seen->due(job_.batch_size(), rows)
                       : rows < job_.rows_seen->rows;
  if (!due) return job_.rows_seen->pass();
  looked_ = true;
  RowLook look;
  look.batch_size = job_.batch_size();
  look.rows = rows;
  look.singles = rows == 1 && first_.size() == 1;
  look.again = job_.rows_seen->looked > 0 && rows >= job_.rows_seen->rows;
  look.device = job_.device;
  if (high_water_) look.peak = room_for_a_look(high_water_->peak());
  if (job_.outside == nullptr) {
    look.compared = job_.coupled == nullptr ? read_
                    : two_pass_             ? two_pass_->outputs().read()
                                            : whole_outputs_->read();
  }
  // Few, and no more of them at a time than a micro-batch has.
  look.few = !whole;
  look.load = [this, rows, whole](Rows part) {
    if (whole) {
      return to_device(job_.inputs->rows(part.begin, part.end), job_.device);
    }
    std::vector<Batch> pieces;
    for (int64_t begin = part.begin; begin < part.end; begin += rows) {
      PinnedCopies::wait();  // it may write to the memory of the last ones
      const Batch piece = job_.inputs->rows(begin, std::min(begin + rows, part.end));
      pieces.push_back(copied(to_device(piece, job_.device)));
    }
    return side_by_side(pieces);
  };
  if (!look.again) recount(look.load);
  look.run = [this](const Batch& inputs, int64_t count) { return try_forward(inputs, count); };
  // Calls of a wrapped model without gradients exclude nobody, who may read parameters.
  const bool moves = job_.outside == nullptr || at::GradMode::is_enabled();
  MovedValues moved(moves ? job_.parameters : std::vector<NamedParameter>(),
                    moves ? buffers_.written_buffers() : std::vector<at::Tensor>(),
                    watch_.memory());
  look.moved = &moved;
  if (own_backward_.value_or(false)) {
    look.gradients.emplace();
    look.gradients->run = [this, compared = look.compared](const Batch& inputs, Rows part,
                                                           const std::vector<int64_t>& dims) {
      return try_gradients(inputs, part, dims, compared);
    };
  }
  const memory::HighWater::Pause apart(high_water_ ? &*high_water_ : nullptr);
  RowLook::Seen seen;
  try {
    seen = look.find();
  } catch (const NoRoomToLook&) {
    // With ops of the whole batch one sample may be cut for memory, so that forward of it never
    // runs as a whole. Two of them side by side may well not fit there.
    if (job_.checkpoints == nullptr || job_.alone) throw;
  }
  rows_differ_ = seen.differs.has_value();
  if (rows_differ_) {
    throw infinitybatch::rows_differ(seen, job_.batch_size(), *job_.rows_seen);
  }
  if (!seen.compared) return job_.rows_seen->pass();
  job_.rows_seen->note(job_.batch_size(), rows, std::move(seen.dims));
}

void Executor::look_at_rows() {
  try {
    compare_rows();
  } catch (const CouplingError&) {
    differ_ = std::current_exception();
  }
}

}  // namespace infinitybatch
