#pragma once

#include "plan/candidates.hpp"
#include "plan/kinds.hpp"
#include "plan/learned.hpp"
#include "plan/prediction.hpp"
#include "plan/request.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// Chooses micro-batch sizes under a memory budget.
///
/// The first step with a new kind of sample is its own experiment: real micro-batches of 2 and 4
/// samples are traced (`plan::probe_size`), every size's peak is predicted from them
/// (`plan::Prediction`), and sizes that fit are timed in turn while their gradients are kept. Once
/// every promising size has been timed often enough the plan is settled: the fastest size whose
/// predicted peak is inside the budget (`plan::Candidates`). Where forward runs twice a size counts
/// as what it takes beside the graphs that fit: many small ones can take less than the fastest
/// size, of which none fits twice. Kinds of samples that differ in length alone share what was
/// learned (`plan::Kinds`).
///
/// A machine with other work on it can make a micro-batch look slower than it is, never faster. So
/// a size counts as fast as the best of its micro-batches are, which are spread over several pieces
/// and, where a step has few rows, over several steps.
class Planner {
 public:
  /// Begins a step. \throws BudgetExceeded where no size can fit
  void begin(const Request& request);
  /// Begins a rehearsal of one, which nothing refuses: what it holds itself (recordings of other
  /// sizes, say) is gone when the step begins, and the step holds copies that it does not.
  void begin_rehearsal(const Request& request);
  /// Whether no size can fit beside what was live at the beginning.
  bool nothing_fits() const;

  /// The next stretch of the step; empty when all rows are done. Of a coupled loss it is the next
  /// stretch of a rehearsal instead, whose gradients are thrown away; empty as soon as enough is
  /// known.
  std::optional<Piece> next();
  /// With `Request::offloads_graphs`, after `begin`: whether what is offloaded is copied in turn,
  /// in larger micro-batches, or sizes leave room for copies beside compute.
  void copy_in_turn(bool in_turn);
  /// Where there is a rehearsal: the step itself.
  Piece two_pass();
  void observe(const Piece& piece, const Measurement& measurement);
  /// Of a loss that is computed outside of the step: what it did to live memory between the passes
  /// of `plan`. The most of what was ever seen counts.
  void saw_whole_loss(const Plan& plan, MicroBatchProfile::Effect effect);
  /// Of such a loss: so much was live when the second pass began.
  void saw_second_pass(int64_t live);
  /// It has run out of memory, and is not begun again: later steps are split into smaller
  /// micro-batches, unless there is more room.
  void second_pass_ran_out(const Piece& piece);
  /// Whether that is known for plans of as many micro-batches, as far as they differ in it.
  bool foresees_whole_loss(const Plan& plan) const;

  /// Takes an out-of-memory error in the middle of a step into account: after it `begin` plans
  /// smaller. \throws BudgetExceeded where nothing smaller is left
  /// \param needed_bytes what would have been live
  /// \param in_loss      it happened in the loss of all outputs
  void ran_out_of_memory(int64_t needed_bytes, bool in_loss = false);

  /// Of a step in micro-batches of at most so many samples, whether it fits or not; nothing where
  /// nothing is known.
  std::optional<int64_t> peak_at(int64_t cap) const;

  /// What is known to be enough of a step like the one that was asked for, see `smallest_budget`.
  std::optional<int64_t> smallest_budget() const;

  /// Whether one micro-batch of the whole logical batch may be tried, where samples are coupled.
  bool whole_batch_may_fit() const;

  /// Whether the last BudgetExceeded was about the smallest plan there is, not about what stands
  /// around it.
  bool smallest_failed() const noexcept { return smallest_failed_; }

  /// True once the plan will not change any more unless memory runs out.
  bool settled() const;
  /// Whether the last plan was settled and for such a step, whatever is live now: then there is
  /// nothing to rehearse in front of it. A rehearsal need not even be prepared.
  bool settled_for(const Request& request) const;
  /// Whether the request follows the plan of longer samples, as ever new lengths do.
  bool follows_longer() const { return kinds_.borrowed(); }
  /// It does not, from now on.
  void plan_alone();

  /// The plan for the current request as far as it is known.
  Plan plan() const;
  /// Its micro-batches have at most so many samples; takes less time to say than the plan.
  int64_t chosen_size() const;

 private:
  /// What may run out of memory.
  struct Attempt {
    int64_t size = 0;  // by which it is split; 0 before the first micro-batch
    int64_t row = 0;   // of these, which are at least so long, the first; of a stretch
    int64_t rows = 0;
    int64_t length = 0;
    bool learns = false;    // whatever is predicted: a trace, or what comes ahead of it
    int64_t kept = 0;       // of a coupled loss: samples whose graphs are kept on the device
    bool overlaps = false;  // of what is offloaded
  };

  plan::Learned& learned() const { return *kinds_.learned(); }
  plan::Prediction prediction() const { return {request_, learned()}; }
  plan::Candidates candidates() const { return {request_, learned()}; }
  /// Where lengths were to be learned, memory ran out: from now on it is with shorter rows. False
  /// where it was something else.
  bool probe_shorter(const Attempt& failed);
  /// Rows that were packed by what they are predicted to take took more: from now on that is
  /// predicted. False where a size is to blame.
  bool raise_prediction(const Attempt& failed, int64_t needed_bytes);
  /// Whether micro-batches are planned by lengths: where these are known, and traces tell of them.
  void choose_lengths();
  /// By what is known of lengths now.
  void pack();
  /// A trace has been taken.
  void learn(const Piece& piece, MicroBatchTrace trace);
  /// What a step took beside what it was predicted to take: where lengths are fit, an error is
  /// measured at the length that it comes from.
  void compare(const Piece& piece, int64_t peak_bytes);
  void refit_at(int64_t length);
  void observe_two_pass(const Piece& piece, const Measurement& measured);
  void observe_streamed(const Piece& piece, const Measurement& measured);
  void learn_times(const Piece& piece, const Measurement& measured);
  /// Where nothing fits: a last resort. \throws BudgetExceeded where none is left
  void find_smallest(int64_t needed_bytes);
  void settle(const Piece& piece);
  void forget_settled_plan();
  Plan make_plan() const;

  Request given_;  // as it was asked
  Request request_;
  plan::Kinds kinds_;
  plan::Candidates::Progress progress_;
  std::optional<Plan> settled_plan_;       // for the current request
  int64_t settled_size_ = 0;               // its `Piece::size`
  mutable std::optional<Plan> full_plan_;  // the settled one with what `explain` needs
  bool smallest_failed_ = false;
  Attempt attempt_;
};

}  // namespace infinitybatch
