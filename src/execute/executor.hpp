#pragma once

#include "autograd/gradient_sinks.hpp"
#include "execute/forwards.hpp"
#include "execute/loss_state.hpp"
#include "execute/loss_total.hpp"
#include "execute/pass.hpp"
#include "execute/pass_times.hpp"
#include "execute/row_checks.hpp"
#include "execute/schedule.hpp"
#include "execute/separable_share.hpp"
#include "execute/setup.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

/// Runs instructions over one logical batch. Until `hand_out` nothing outside of it has changed but
/// random state and, between `load` and `free`, buffers; `roll_back` undoes these.
class Executor {
 public:
  explicit Executor(const Setup& setup);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// \param rows the micro-batch's rows; ignored where the instruction is for the whole batch
  /// \throws CouplingError from `forward`, `record`, `retain` and `hand_out` where samples are
  /// coupled
  void run(const Instruction& instruction, Rows rows);

  /// What is looked at by itself in front of the hand-out; with an external loss once the outputs
  /// are there, and what that finds is thrown by `finish_forward`, where nothing else says more.
  RowChecks& checks() noexcept { return checks_; }
  const RowChecks& checks() const noexcept { return checks_; }
  /// The user's forward.
  Forwards& forwards() noexcept { return forwards_; }
  const Forwards& forwards() const noexcept { return forwards_; }

  /// Buffers and rewritten weights as the step found them.
  void roll_back();

  /// With an external loss, once the outputs are there: buffers get what the forward of the whole
  /// batch leaves in them, and the parameters' gradients go to the sinks no more.
  /// \throws CouplingError naming a buffer on which micro-batches do not agree
  void finish_forward();
  /// Then, once it cannot fail any more: what would undo forward is let go of.
  void end_forward();
  /// The rest of the plan has failed: lets go of what it had at work.
  void abandon();
  /// Then, in front of the rest of the plan; uninstall the sinks after it.
  /// \param keep       the rest may run once more
  /// \param repeatable of tapes that are cut: where it fails it may `begin_again`
  void begin_backward(bool keep, bool repeatable = false);
  /// The rest of the plan has failed half way, and what waits for it is to be computed again: by
  /// `recompute` from the inputs on.
  void begin_again() { pass_.begin_again(); }

  // With an external loss, of a model that is not cut:
  /// Graphs that are kept for backward; they may be dropped whenever their memory is needed.
  int64_t kept_graphs() const { return pass_.kept_graphs(); }
  bool drop_graphs() { return pass_.drop_graphs(); }
  void drop_graph(Rows rows) { pass_.drop_graph(rows); }
  GraphBytes kept_graph_bytes() const { return pass_.kept_graph_bytes(); }
  /// Why the user's forward will run again in backward; nothing where it need not.
  std::optional<std::string> will_run_again() const { return pass_.will_run_again(); }
  /// Whether backward has played a tape.
  bool replayed() const noexcept { return pass_.replayed(); }
  /// The whole batch's loss, detached, in the loss's own type. Once `hand_out` has run neither this
  /// nor `take_outputs` can fail any more.
  at::Tensor loss() const;
  /// All outputs in order, with `keep_outputs`.
  std::optional<Batch> take_outputs();
  autograd::GradientSinks& sinks() noexcept { return sinks_; }
  /// With `Strategy::offloads`: what instructions took so far.
  const PassTimes& times() const noexcept { return times_; }
  /// And forgets that.
  PassTimes take_times() { return std::exchange(times_, {}); }
  /// Of graphs that were offloaded.
  GraphBytes graph_bytes() const { return pass_.graph_bytes(); }
  /// Somebody asks for `failed_rows`: what fails runs once more.
  void look_for_few_rows() noexcept {
    forwards_.few().look(problem_.batch_size());
    if (share_) share_->few().look(problem_.batch_size());
  }
  /// Samples of the micro-batch that were too few for forward, or for a loss of micro-batches,
  /// which failed; 0 where that is not why.
  int64_t failed_rows() const noexcept {
    return std::max(forwards_.few().failed(), share_ ? share_->few().failed() : 0);
  }
  /// Whether the loss of all outputs is at work, or failed.
  bool in_whole_loss() const noexcept { return in_whole_loss_; }
  /// Whether samples are coupled by what no cut can answer: what forward leaves in buffers,
  /// parameters and attributes, or ordinary ops.
  bool coupled_beyond_cuts() const noexcept { return forwards_.apart() || checks_.beyond_cuts(); }
  /// How many segments the model's tapes are cut into; with `Strategy::cuts`, after the first
  /// `record`.
  int64_t segments() const { return pass_.segments(); }
  /// Of one micro-batch, with `Strategy::checkpoints`, between its `record` and its last
  /// `backward`.
  int64_t segments(Rows rows) const { return pass_.segments(rows); }
  Stretches stretches(Rows rows) const { return pass_.stretches(rows); }
  /// One micro-batch's recording, once it is recorded.
  const tape::Tape& tape(Rows rows) const { return pass_.tape(rows); }
  /// The same, with `Strategy::is_cut`, with its cuts.
  const Recorded& recorded(Rows rows) const { return pass_.recorded(rows); }
  /// Why the user's forward ran twice for some rows; nothing where it did not.
  std::optional<std::string> opaque() const { return pass_.opaque(); }

 private:
  void perform(const Instruction& instruction, Rows rows);
  void perform_and_time(const Instruction& instruction, Rows rows);
  void each_check(void (Check::*moment)());
  void loss(Rows rows);
  void backward(Rows rows, int64_t segment);
  void record(Rows rows, bool retain);
  void record_for_cuts(Rows rows);
  void whole_loss();
  void replay(Rows rows);
  void advance(Rows rows, const Instruction& instruction);
  void resume(Rows rows, int64_t segment);
  void load_for(Rows rows, int64_t segment);
  void free();
  /// Lets go of the micro-batch at work, and of its graph.
  void release();
  void penalty();
  void hand_out();
  void finish();

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  autograd::GradientSinks sinks_;
  Forwards forwards_;
  RowChecks checks_;
  LossState loss_state_;
  bool going_back_ = false;  // with an external loss: forward is over
  bool in_whole_loss_ = false;
  std::unique_ptr<SeparableShare> share_;  // of a separable loss
  std::unique_ptr<WholeOutputs> whole_;    // of a coupled loss
  Pass pass_;

  PassTimes times_;
  int64_t copied_bytes_ = 0;  // whose copies the instruction at work began

  LossTotal total_;
  at::Tensor final_loss_;  // what `loss` and `take_outputs` give, made before the hand-out
  std::optional<Batch> final_outputs_;
};

}  // namespace infinitybatch
