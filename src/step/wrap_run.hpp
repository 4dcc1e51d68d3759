#pragma once

#include "execute/executor.hpp"
#include "execute/external_loss.hpp"
#include "step/wrap_seam.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// One call of a wrapped model: the engine with the caller's loss in the middle. Forward runs a
/// plan up to the outputs of all micro-batches; backward runs the rest of it from the gradient of
/// these, later, never, or more than once.
class WrapRun final : public ExternalLoss {
 public:
  /// What a forward that counts gave, with its graph; returns the outputs among that.
  using Taken = std::function<Batch(Rows rows, const Batch& inputs, Batch outputs)>;

  /// \param step       of the wrapped model
  /// \param buffers   as forward found them
  /// \param recording whether outputs are to have a graph
  /// \param forward   runs the model
  /// \param taken     of a model that is not cut, as soon as a micro-batch's forward is over
  WrapRun(WrappedCall& call, const Setup& setup, std::shared_ptr<const BufferValues> buffers,
          bool recording, std::function<Batch(const Batch&)> forward, Taken taken);
  ~WrapRun() override;
  WrapRun(const WrapRun&) = delete;
  WrapRun& operator=(const WrapRun&) = delete;

  /// Whether ops of the model see the whole batch: its tapes are cut there.
  bool cut() const noexcept { return setup_.strategy.is_cut(); }
  /// What forward found in buffers, and in parameters that it has written.
  const BufferValues& found() const noexcept { return *buffers_; }
  Executor& engine() { return *executor_; }
  const Executor& engine() const { return *executor_; }
  size_t part_count() const noexcept { return parts_.size(); }
  /// Whether outputs have a graph.
  bool recording() const noexcept { return recording_; }
  /// Graphs that are kept for backward; they may be dropped whenever their memory is needed.
  int64_t kept_graphs() const { return executor_ ? executor_->kept_graphs() : 0; }
  /// Returns whether there were any; false while backward is at work in another thread.
  bool drop_graphs();

  /// Lets go of all boundary activations of the whole batch: `backward` runs forward again, and
  /// keeps the fewest that a plan could. False where there are none, or backward is at work.
  bool drop_boundaries();

  /// Forward of one micro-batch.
  /// \param keep its graph, too
  void record(Rows rows, bool keep);

  /// With static_graph: what earlier calls know of this one.
  const StaticForward& known() const noexcept { return known_; }
  /// And what this one knows, once forward is over.
  void learn(std::vector<bool> wants_gradient, std::vector<NamedParameter> leaves, bool ambiguous,
             std::vector<LeftOutputs::Entry> left);

  /// What waits is offloaded next time, where that is allowed and this call's was not.
  void offload_next_time() const;
  /// `backward` has taken so many bytes too much. Fewer boundary activations of
  /// the whole batch are kept next time, and in another `backward` of this call, which begins at
  /// the inputs; false where that does not help.
  bool keep_fewer_boundaries(int64_t bytes);
  /// The same for another call that needs so many bytes beside this one: next time, with a given
  /// size.
  void leave_room_next_time(int64_t bytes) const;
  /// Another `backward` begins at the inputs, if this one has used up what waited.
  bool begin_anew();
  /// There will be no other one.
  void give_up();

  /// What is run of now on, up to its loss of all outputs and, in `backward`, from there.
  void begin(Plan plan);
  const Plan& plan() const noexcept { return plan_; }
  /// The instruction in whose place the caller's loss stands.
  size_t loss_at() const noexcept { return loss_at_; }
  Rows rows_of(const Instruction& instruction) const;
  void run(size_t from, size_t to);
  /// What was copied since forward began, or this was called last, goes to the call's report.
  void tell_copies();
  /// What the model gave, detached, micro-batch by micro-batch.
  std::vector<Batch> take_outputs();
  /// The outputs of these rows that are one number, which those of a second forward have to equal.
  void keep_numbers(Rows rows, Batch numbers) {
    parts_.at(rows.begin).numbers = std::move(numbers);
  }
  /// Buffers get what the whole batch's forward leaves there.
  /// \throws CouplingError naming a buffer on which micro-batches do not agree
  void finish_forward();
  /// Forward cannot fail any more: what would undo it is let go of.
  void end_forward() {
    executor_->end_forward();
    taken_ = nullptr;
  }
  /// Buffers and random state of user code as before.
  void roll_back() { executor_->roll_back(); }

  /// Gradients of the call's leaves, then of the inputs that want one.
  /// \param keep it may be called once more
  /// \throws StateError after a pass of a cut model without `keep` that failed
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients, bool keep);

  Batch take(Rows rows, const Batch& inputs, Batch outputs) override;
  Batch& taken(Rows rows) override { return parts_.at(rows.begin).outputs; }
  Batch forward_again(const Batch& inputs) override;
  void compare(Rows rows, const Batch& outputs) override;
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output) const override;
  void collect(Rows rows, const Batch& inputs) override;

 private:
  /// A micro-batch, or a segment of it, has gone back.
  void end_backward_of_part();
  /// Nothing where second forwards gave other outputs.
  std::optional<std::vector<at::Tensor>> run_backward(const std::vector<at::Tensor>& gradients,
                                                      bool keep);
  std::vector<at::Tensor> run_backward_or_forward_again(const std::vector<at::Tensor>& gradients,
                                                        bool keep);
  void follow_tapes();
  /// Whether `keep_fewer_boundaries` may be an answer.
  bool may_keep_fewer() const;
  /// From the next `backward` on, which begins at the inputs.
  void keep_others(const KeptBoundaries& kept);
  /// From the inputs to the last op of the whole batch, where the plan keeps other boundary
  /// activations than there are.
  void go_forward_again();
  /// Those on their way from segment to segment, where what waits is kept.
  void forget_gradients();

  WrappedCall& call_;
  const std::shared_ptr<const BufferValues> buffers_;  // as forward found them, and parameters
  const bool recording_;
  Taken taken_;
  BatchSource inputs_;
  BatchSource targets_;
  Model model_;
  Setup setup_;
  StaticForward known_;
  std::string kind_;                       // of forward, with static_graph
  std::shared_ptr<offload::Store> store_;  // the step's
  offload::StoreStatistics told_;          // of it
  std::recursive_mutex at_work_;           // held by backward, and while graphs are dropped
  std::optional<Executor> executor_;       // none after a backward that used it up
  Plan plan_;
  size_t loss_at_ = 0;
  std::vector<int64_t> begins_;  // of the plan's micro-batches
  struct Part {
    Batch outputs;
    Batch numbers;
  };
  std::map<int64_t, Part> parts_;  // by first row
  std::optional<WrapSeam> seam_;   // while backward runs
  bool used_up_ = false;
  bool again_ = false;  // the next backward begins at the inputs
};

}  // namespace infinitybatch
