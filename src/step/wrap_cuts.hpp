#pragma once

#include "wrap_seam.hpp"

#include <infinitybatch/execute/executor.hpp>
#include <infinitybatch/execute/outside_loss.hpp>
#include <infinitybatch/execute/plan.hpp>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace infinitybatch {

/// One call of a wrapped model whose ops see the whole batch. Forward runs a plan from cut to cut
/// up to the outputs of all micro-batches; what waits at the cuts is kept, on the device or in the
/// job's store, and backward runs the rest of the plan from the gradient of the outputs.
class WrapCuts final : public OutsideLoss {
 public:
  /// \param job     of the wrapped model
  /// \param recording whether outputs are to have a graph
  /// \param forward   runs it, while this pass records
  WrapCuts(WrappedCall& call, const Job& job, std::shared_ptr<const BufferValues> buffers,
           bool recording, std::function<Batch(const Batch&)> forward);
  ~WrapCuts() override;
  WrapCuts(const WrapCuts&) = delete;
  WrapCuts& operator=(const WrapCuts&) = delete;

  /// Records one micro-batch.
  void record(Rows rows);
  /// How many segments the recordings have: with one, nothing in the model sees the whole batch.
  int64_t segments() const { return executor_->segments(); }
  const tape::Tape& tape(Rows rows) const { return executor_->tape(rows); }
  /// Whether a number in it may count samples, which micro-batches of one length do not tell.
  bool may_count() const { return executor_->wants_other_rows(); }
  /// From then on this leaf's gradient is one that `backward` gives.
  void adopt(const at::Tensor& leaf) { executor_->sinks().adopt(leaf); }

  /// With static_graph: what earlier calls know of this one.
  const StaticForward& known() const noexcept { return known_; }
  /// And what this one knows, once forward is over.
  void learn(std::vector<bool> wants_gradient, std::vector<NamedParameter> leaves, bool ambiguous,
             std::vector<LeftOutputs::Entry> left);

  /// What waits is offloaded next time, where that is allowed and this call's was not.
  void offload_next_time() const;

  /// Runs the instructions of a `cut_plan`, offloaded where the job has a store, after the
  /// recordings, up to the outputs of all.
  void forward(Plan plan);
  /// What the model gave, detached, micro-batch by micro-batch.
  std::vector<Batch> take_outputs();
  /// See `Executor::look_at_rows`.
  void look_at_rows() { executor_->look_at_rows(); }
  bool looked() const noexcept { return executor_->looked(); }
  /// Buffers get what the whole batch's forward leaves there.
  /// \throws CouplingError naming a buffer on which micro-batches do not agree
  void finish_forward();
  /// Buffers and random state of user code as before.
  void roll_back() { executor_->roll_back(); }

  /// Gradients of the call's leaves, then of the inputs that want one.
  /// \param keep it may be called once more
  /// \throws StateError after a pass without `keep` that failed
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients, bool keep);

  void take(Rows rows, const Batch& outputs) override;
  void compare(Rows rows, const Batch& outputs) override;
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output) const override;
  void collect(Rows rows, const Batch& inputs) override;

 private:
  void run(size_t from, size_t to);
  std::vector<at::Tensor> run_backward();
  /// Those on their way from segment to segment, where what waits is kept.
  void forget_gradients();

  WrappedCall& call_;
  const std::shared_ptr<const BufferValues> buffers_;  // as forward found them
  BatchSource inputs_;
  BatchSource targets_;
  Model model_;
  Job job_;
  coupled::DrawLaws draw_laws_;
  StaticForward known_;
  std::string kind_;                       // of forward, with static_graph
  std::shared_ptr<offload::Store> store_;  // the job's
  std::optional<Executor> executor_;       // none after a backward that used it up
  Plan plan_;
  size_t loss_at_ = 0;  // the instruction in whose place the caller's loss stands
  struct Part {
    Batch outputs;
    Batch numbers;
  };
  std::map<int64_t, Part> parts_;  // by first row
  std::optional<WrapSeam> seam_;   // while backward runs
  bool used_up_ = false;
};

}  // namespace infinitybatch
