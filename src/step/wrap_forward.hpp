#pragma once

#include "core/collectives.hpp"
#include "step/own_losses.hpp"
#include "step/wrap_run.hpp"
#include "step/wrapped_call.hpp"

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

namespace infinitybatch {

/// How one forward pass is split.
struct Split {
  std::vector<int64_t> sizes;
  int64_t retained = 0;   ///< of the last micro-batches: keep their graph, beside the tape
  bool overlaps = false;  ///< what is offloaded is copied while other micro-batches compute
  std::optional<int64_t> segments = std::nullopt;  ///< of cut tapes, that it was planned for
};

/// Inputs that a forward may have to run on again.
class Rerunnable {
 public:
  explicit Rerunnable(const Batch& inputs);
  /// \throws Unsupported where they have been changed in place
  void check() const;
  bool holds() const;

 private:
  std::vector<Version> versions_;
};

/// One forward pass over all micro-batches of a wrapped model: what its caller's graph has to know
/// of it, and the outputs of all.
class ForwardPass {
 public:
  ForwardPass(std::shared_ptr<Wrapped> wrapped, const Setup& setup, const Batch& inputs,
              BatchKind kind);
  ForwardPass(const ForwardPass&) = delete;
  ForwardPass& operator=(const ForwardPass&) = delete;

  /// All micro-batches, and the outputs of all.
  /// \throws NothingToCut    where the model is to be cut and nothing in it sees the whole batch
  /// \throws SegmentsChanged where its tapes have more or fewer segments than planned
  Batch run(Split split);

  /// One micro-batch: `finish` comes after the last.
  void run(Rows rows, bool keep = false);
  /// Whether all micro-batches were of one length until now, and one of another would tell along
  /// which dimension outputs lie, which of them stand once, or which numbers count samples.
  bool wants_another_size() const;
  /// The outputs of all, with their node where they want a gradient.
  Batch finish();
  /// Whether micro-batches are joined; running out of memory then is no matter of their size.
  bool finishing() const noexcept { return finishing_; }
  int64_t failed_rows() const { return call_->run->engine().failed_rows(); }
  /// See `Forwards::saw_coupling`.
  bool saw_coupling() const { return call_->run->engine().forwards().saw_coupling(); }

  /// Buffers, rewritten weights and random state as the pass found them.
  void roll_back();

  /// Whether this forward has compared rows.
  bool looked() const { return call_->run->engine().checks().looked(); }
  /// What tells the planner how much the call needs: looks at other rows are no part of that.
  void measured_by(const memory::HighWater& mark) noexcept { planners_mark_ = &mark; }

  const std::shared_ptr<WrappedCall>& call() const noexcept { return call_; }
  const std::vector<int64_t>& sizes() const noexcept { return row_counts_; }

 private:
  void read(const Batch& inputs);
  void read(const NamedParameter& parameter);
  /// Whether an output that is one number is the sum or mean that the user says, or that its op is
  /// known to be: where rows are looked at. \throws BatchError
  void check_reduce(const JoinedOutputs& joined);
  /// The user's forward; with what it leaves beside its outputs behind them.
  Batch run_model(const Batch& micro);
  Batch without_left(Batch outputs, bool keep = false);
  /// Of a model that is not cut: a micro-batch's forward is over, its graph is there yet.
  /// \returns its outputs, without what stands behind them
  Batch meet(const Batch& inputs, Batch outputs);
  void take_outputs_of_cuts();
  /// What waits in front of ops of the whole batch, once these rows are recorded. With a given size
  /// fewer are kept where backward, of which nothing is known yet, cannot fit beside them.
  void learn_boundaries(Rows first, KeptBoundaries& kept);
  /// To `Options::on_micro_batch`, of a model that is cut.
  void show(Rows rows, const Batch& outputs) const;
  void hand_out_left(const Batch& outputs);
  /// Of a model that is cut, each time that it runs.
  void learn_from_recording(const Batch& outputs, const Batch& micro, uint64_t first_node);
  /// Notes where gradients go that are no parameters of the model, before the graph is dropped.
  void note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node);
  /// Where forward left tensors with a graph in attributes: whether a graph of the outputs can be
  /// kept beside them, which backward would use up under a loss that reads both.
  bool may_keep_beside(const std::vector<at::Tensor>& left);
  /// Which outputs come from the samples, as far as this recording tells.
  void note_sources(const tape::Tape& tape);
  /// Whether that of further micro-batches matters.
  bool may_stand_once() const;
  bool cut() const noexcept { return call_->run->cut(); }

  const Options& options_;
  const WrapOptions& own_;
  const bool exact_;
  const bool recording_;
  std::shared_ptr<WrappedCall> call_;
  const Setup& setup_;
  std::shared_ptr<BufferValues> values_;
  RngSnapshot before_;
  std::unordered_set<c10::TensorImpl*> known_leaves_;
  size_t parameters_ = 0;  // among the call's leaves, the first ones
  const memory::HighWater* planners_mark_ = nullptr;
  Rows rows_at_work_;
  bool part_ = false;     // they are not all of the samples
  bool keeping_ = false;  // its graph
  bool may_keep_ = true;  // that
  const CollectivesSince said_;
  uint64_t first_node_ = 0;     // of its graph, or before it
  std::vector<Batch> outputs_;  // of a model that is cut
  std::vector<int64_t> row_counts_;
  OwnLosses own_losses_;
  std::vector<std::vector<OwnLoss>> losses_;  // of each micro-batch
  std::vector<bool> wants_gradient_;          // of each leaf of the outputs
  std::vector<bool> from_samples_;            // the same; empty where nothing was recorded
  // What the node's edges need; the call itself holds inputs without their graph.
  Batch inputs_;
  bool ambiguous_ = false;  // along which dimension outputs lie
  bool finishing_ = false;
  std::optional<LeftOutputs> left_;  // none where nobody looks, or it does not work
};

}  // namespace infinitybatch
