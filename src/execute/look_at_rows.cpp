// The part of RowChecks that compares rows of a larger batch with the same rows of a smaller one.
#include "autograd/engine.hpp"
#include "core/pinned_copies.hpp"
#include "core/sample_rows.hpp"
#include "coupled/fixed_ops.hpp"
#include "execute/copied_batch.hpp"
#include "execute/findings.hpp"
#include "execute/light_recording.hpp"
#include "execute/rounded_ops.hpp"
#include "execute/row_checks.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

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

void RowChecks::read_by(const at::Tensor& share) {
  experiment_.read_by(share);
  if (!problem_.looks_at_rows() || !read_.empty() || !share.requires_grad()) return;
  // Micro-batches that are smaller than any so far are few.
  if (!resources_.findings->rows_seen.due(problem_.batch_size(), forwards_.smallest())) return;
  std::map<const torch::autograd::Node*, std::vector<size_t>> leaves;
  read_.resize(forwards_.outputs.leaves().size(), false);
  for (size_t i = 0; i < read_.size(); ++i) {
    const at::Tensor& tensor = forwards_.outputs.leaves()[i].tensor;
    if (tensor.defined() && tensor.requires_grad()) leaves[tensor.grad_fn().get()].push_back(i);
  }
  autograd::walk_graph({share}, [&](const torch::autograd::Node& node) {
    const auto found = leaves.find(&node);
    if (found == leaves.end()) return;
    for (const size_t leaf : found->second) read_[leaf] = true;
  });
}

std::optional<TrialOutputs> RowChecks::try_forward(const Batch& inputs, int64_t rows,
                                                   uint32_t rounded) {
  std::optional<TrialOutputs> tried;
  const auto run = [&](bool light) {
    forwards_.aside(/*trial=*/true, [&] {
      forwards_.inputs = as_leaves(forwards_.wrote_inputs() ? copied(inputs) : inputs);
      const std::vector<at::Device> devices = devices_of(problem_);
      coupled::FixedOps fixed(devices, rows, forwards_.watch(), /*backward=*/false);
      const auto call = [&] {
        std::optional<RoundedOps> otherwise;
        if (rounded != 0) otherwise.emplace(rounded);
        forwards_.run({0, rows});
        return std::exchange(forwards_.outputs, Batch());
      };
      Batch outputs;
      if (light) {
        tape::Recorder recorder(forwards_.inputs, {}, devices);
        recorder.lighten(problem_.device);
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

bool RowChecks::try_gradients(const Batch& inputs, Rows rows, const std::vector<int64_t>& dims,
                              const std::vector<bool>& compared, const ShowGradient& show,
                              uint32_t rounded) {
  bool shown = false;
  forwards_.aside(/*trial=*/true, [&] {
    forwards_.inputs = as_leaves(forwards_.wrote_inputs() ? copied(inputs) : inputs);
    coupled::FixedOps fixed(devices_of(problem_), rows.size(), forwards_.watch(),
                            /*backward=*/true);
    const at::AutoGradMode recording(/*enabled=*/true);
    std::optional<RoundedOps> otherwise;
    if (rounded != 0) otherwise.emplace(rounded);
    forwards_.run({0, rows.size()});
    const at::Tensor number =
        weighed(std::exchange(forwards_.outputs, Batch()), dims, compared, rows);
    if (!number.defined() || fixed.stood_in()) return;
    show_gradients(problem_.parameters, number, show);
    shown = !fixed.strayed();
  });
  return shown;
}

void RowChecks::compare_rows() {
  if (!problem_.looks_at_rows() || forwards_.watch().collective()) return;
  if (coupled::FixedOps::at_work()) return;  // this step is part of a forward that is looked at
  const int64_t rows = forwards_.smallest();
  if (rows == 0 || rows >= problem_.batch_size()) return;
  RowsSeen& known = resources_.findings->rows_seen;
  // Rows of the user's own making are asked for again in first steps alone: they may be drawn.
  const bool whole = problem_.loss.external() != nullptr || keeps_rows(*problem_.inputs);
  const bool due =
      whole || known.steps == 0 ? known.due(problem_.batch_size(), rows) : rows < known.rows;
  if (!due) return known.pass();
  looked_ = true;
  RowLook look;
  look.batch_size = problem_.batch_size();
  look.rows = rows;
  look.joins = problem_.loss.separable() == nullptr;
  look.singles = rows == 1 && forwards_.first().size() == 1;
  look.sorted = problem_.trimming != nullptr;
  look.again = known.looked > 0 && rows >= known.rows;
  look.dims = known.dims;
  look.most = known.most;
  look.device = problem_.device;
  if (high_water_) {
    peak_before_look_ = high_water_->peak();
    look.peak = room_for_a_look(peak_before_look_, problem_.device);
  }
  if (problem_.loss.external() == nullptr) {
    look.compared = whole_ != nullptr ? whole_->read() : read_;
  }
  // Few, and no more of them at a time than a micro-batch has.
  look.few = !whole;
  look.load = [this, rows, whole](const std::vector<Rows>& parts) {
    // What is there as a whole needs no copy of two of its rows.
    if (parts.size() == 2 && whole && !problem_.trimming && problem_.device.is_cpu()) {
      return every(problem_.inputs->rows(parts[0].begin, parts[1].end),
                   parts[1].begin - parts[0].begin);
    }
    std::vector<Batch> pieces;
    for (const Rows part : parts) {
      const int64_t most = whole ? part.size() : rows;
      for (int64_t begin = part.begin; begin < part.end; begin += most) {
        if (!whole) PinnedCopies::wait();  // it may write to the memory of the last ones
        const Batch piece = to_device(
            problem_.inputs->rows(begin, std::min(begin + most, part.end)), problem_.device);
        pieces.push_back(whole ? piece : copied(piece));
      }
    }
    const Batch inputs = side_by_side(pieces);
    const bool trims = problem_.trimming && problem_.trimming->knows_outputs();
    return trims ? problem_.trimming->inputs(inputs, parts.front()) : inputs;
  };
  if (!look.again) recount([&look](Rows part) { return look.load({part}); });
  look.run = [this](const Batch& inputs, int64_t count, uint32_t rounded) {
    return try_forward(inputs, count, rounded);
  };
  // Calls of a wrapped model without gradients exclude nobody, who may read parameters.
  const bool moves = problem_.loss.external() == nullptr || at::GradMode::is_enabled();
  MovedValues moved(moves ? problem_.parameters : std::vector<NamedParameter>(),
                    moves ? forwards_.buffers().written_buffers() : std::vector<at::Tensor>(),
                    forwards_.watch().memory());
  look.moved = &moved;
  if (forwards_.own_backward().value_or(false)) {
    look.gradients.emplace();
    for (const NamedParameter& parameter : problem_.parameters) {
      if (parameter.tensor.requires_grad()) look.gradients->numbers += parameter.tensor.numel();
    }
    look.gradients->run = [this, compared = look.compared](
                              const Batch& inputs, Rows part, const std::vector<int64_t>& dims,
                              const ShowGradient& show, uint32_t rounded) {
      return try_gradients(inputs, part, dims, compared, show, rounded);
    };
  }
  const memory::HighWater::Pause apart(high_water_ ? &*high_water_ : nullptr);
  RowLook::Seen seen;
  try {
    seen = look.find();
    // Nothing else sees what a look takes of an accelerator.
    if (seen.grown > 0 && memory::Limit::is_passed()) throw LookedTooFar{seen.grown};
    memory::Limit::check();
  } catch (const NoRoomToLook&) {
    // With ops of the whole batch one sample may be cut for memory, so that forward of it never
    // runs as a whole. Two of them side by side may well not fit there.
    if (!strategy_.checkpoints() || strategy_.per_micro_batch()) throw;
  }
  rows_differ_ = seen.differs.has_value();
  if (rows_differ_) {
    throw infinitybatch::rows_differ(seen, problem_.batch_size(), known,
                                     problem_.inputs->rows(0, 1));
  }
  if (!seen.compared) return known.pass();
  known.note(problem_.batch_size(), rows, std::move(seen.dims));
}

}  // namespace infinitybatch
