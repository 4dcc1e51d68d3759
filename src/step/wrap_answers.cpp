// What a wrapped model's forward does about an attempt that has failed: the answers of
// `recovery_table`.
#include "step/kept_boundaries.hpp"
#include "step/options.hpp"
#include "step/sorted_batch.hpp"
#include "step/waiting_calls.hpp"
#include "step/wrap_call.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace infinitybatch {

/// An attempt has thrown `failed_`. Returns whether the next one is a restart.
/// \throws what the user should see, where there is no answer
bool ForwardCall::answer(const memory::Limit* limit) {
  Failure& failure = failed_.failure;
  if (failure == Failure::out_of_memory) {
    // The user's own error says nothing of our sizes.
    if (limit == nullptr || !limit->allocation_failed()) {
      failure = Failure::other;
    } else {
      needed_ = std::max(limit->refused(), *budget_ + 1);
      refused_ = limit->refused() > 0;
    }
  }
  if (const auto found = recover(failure, answers())) return is_restart(*found);
  switch (failure) {
    case Failure::other_segments:
      refuse_given_segments("give micro_batch_size alone");
    case Failure::coupling:
      refuse_coupled(coupling_ ? coupling_ : failed_.error, setup_.problem);
    case Failure::no_plan:
    case Failure::out_of_memory: {
      if (coupling_ && failure == Failure::no_plan) std::rethrow_exception(coupling_);
      if (!failed_.refusal) std::rethrow_exception(failed_.error);
      const std::lock_guard<std::mutex> lock(wrapped_->mutex);
      refuse_budget(failed_, wrapped_->known.of(kind_).few_rows, rows_.size);
    }
    default:
      std::rethrow_exception(failed_.error);
  }
}

Answers ForwardCall::answers() {
  return {
      {Answer::record_anew, [] { return true; }},
      {Answer::look_less, [this] { return look_less(); }},
      {Answer::follow_segments, [this] { return follow_segments(); }},
      {Answer::cut, [this] { return begin_cuts(); }},
      {Answer::stop_cutting, [this] { return end_cuts(); }},
      {Answer::whole_batch, [this] { return begin_whole_batch(); }},
      {Answer::larger_micro_batches, [this] { return begin_larger(); }},
      {Answer::drop_graphs,
       [this] { return budget_ && drop_graphs(*wrapped_, setup_.problem.device, before_); }},
      {Answer::smaller_micro_batches, [this] { return plan_smaller(); }},
      {Answer::second_forwards, [this] { return give_up_graphs(); }},
      {Answer::recompute, [this] { return begin_recompute(); }},
      {Answer::offload, [this] { return begin_offload(); }},
      {Answer::drop_boundaries, [this] { return make_others_go_forward_again(); }},
  };
}

/// Each attempt begins with what is known of its kind, a rehearsal with what the call has.
bool ForwardCall::look_less() {
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  findings_.rows_seen.most = failed_.looked_at / 2;
  wrapped_->known.of(kind_).findings.rows_seen.most = findings_.rows_seen.most;
  return true;
}

bool ForwardCall::follow_segments() {
  rerunnable_.check();
  wrapped_->segments = failed_.segments;
  memory().boundaries.reset();
  memory().kept.reset();
  return ++changes_ <= 3;
}

bool ForwardCall::begin_recompute() {
  const bool possible = budget_ && with_gradients_ && setup_.strategy.is_cut() &&
                        !setup_.strategy.offloads() &&
                        options_.offload.when == Offload::When::never && memory().boundaries &&
                        (options_.micro_batch_size ? refused_ : planner().smallest_failed());
  if (!possible) return false;
  KeptBoundaries& kept = memory().kept;  // by the attempt that failed
  BoundaryShortage shortage{*memory().boundaries, planner(), rows_.size, *budget_};
  if (options_.micro_batch_size) {
    shortage.most = *budget_ - memory::live(setup_.problem.device);
  }
  if (!keep_fewer(kept, shortage)) return false;
  setup_.strategy.kept = kept;
  return true;
}

/// From now on what waits of batches of this kind leaves the device; false where it cannot.
bool ForwardCall::begin_offload() {
  // What the system refused of a given size comes back as it is.
  if (!budget_ || (failed_.failure != Failure::no_plan && is_given_to_the_system())) return false;
  const bool keeps = with_gradients_ && options_.retained_micro_batches > 0;
  const bool possible =
      options_.offload.when != Offload::When::never &&
      (options_.micro_batch_size ? setup_.strategy.is_cut() || keeps
                                 : setup_.strategy.is_cut() && planner().smallest_failed());
  if (!possible || setup_.strategy.offloads()) return false;
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  // What was said before and has not helped would not help again.
  return wrapped_->known.memory_of(kind_).begin_offload();
}

/// Second forwards instead, where a plan found no room for graphs, on the device or beyond it.
bool ForwardCall::give_up_graphs() {
  return !options_.micro_batch_size && wrapped_->graph_choices[planner_].give_up(kind_.shapes());
}

/// Their next plans leave the room.
bool ForwardCall::make_others_go_forward_again() {
  const at::Device device = setup_.problem.device;
  if (!budget_ || !failed_.refusal || !drop_boundaries(*wrapped_, device, before_)) return false;
  ask_for_room(*failed_.refusal, device);
  return true;
}

bool ForwardCall::begin_cuts() {
  // A buffer that depends on the samples does so cut or not, as a plan may find out.
  if (options_.static_graph || (!budget_ && !saw_coupling_)) return false;
  rerunnable_.check();
  if (uncut_ || setup_.strategy.is_cut()) return false;
  setup_.strategy.cuts = Strategy::Cuts::whole_batch_ops;
  return true;
}

/// What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
/// not be.
bool ForwardCall::end_cuts() {
  const bool nothing = failed_.failure == Failure::nothing_to_cut;
  if (!nothing && options_.static_graph) return false;
  if (!nothing) coupling_ = failed_.error;
  const bool fixed = options_.micro_batch_size.has_value();
  if (!nothing && fixed && !budget_) return false;
  const bool was_cut = setup_.strategy.is_cut();
  setup_.strategy.cuts = Strategy::Cuts::none;
  uncut_ = true;
  wrapped_->sees_whole_batch() = false;
  if (!nothing && fixed) return false;
  // The planner has yet to meet the model as it is.
  return nothing || was_cut;
}

bool ForwardCall::begin_whole_batch() {
  const bool may_try = !options_.static_graph && !options_.micro_batch_size && planned_ &&
                       !setup_.problem.is_reordered();
  if (!may_try || !planner().whole_batch_may_fit()) return false;
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  Knowledge& known = wrapped_->known.of(kind_);
  if (!coupling_) coupling_ = failed_.error;
  known.why_coupled = coupling_;
  return !std::exchange(known.whole, true);
}

bool ForwardCall::begin_larger() {
  if (!planned_ || !rerunnable_.holds()) return false;
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  return wrapped_->known.of(kind_).few_rows.meet(failed_rows_, rows_.size, failed_.error);
}

bool ForwardCall::plan_smaller() {
  if (is_given_to_the_system()) return false;
  try {
    refuse_smaller();
    return true;
  } catch (const BudgetExceeded& refusal) {
    failed_.refusal = refusal;
    return false;
  }
}

/// Makes the planner plan smaller. \throws BudgetExceeded, what the user should see, where it
/// cannot
void ForwardCall::refuse_smaller() {
  if (finishing_) {
    // Micro-batches of a call that keeps nothing are tried whatever is predicted.
    const bool streams = planned_ && !with_gradients_ && !setup_.strategy.is_cut();
    std::optional<int64_t> smallest = streams ? planner().smallest_budget() : std::nullopt;
    if (smallest <= *budget_) smallest.reset();
    throw BudgetExceeded(needed_, *budget_, smallest,
                         "the outputs of all " + std::to_string(setup_.problem.batch_size()) +
                             " samples while they are joined",
                         live_with_gradients());
  }
  if (options_.micro_batch_size) {
    throw BudgetExceeded(needed_, *budget_, std::nullopt, given_size(options_),
                         live_with_gradients());
  }
  if (!planned_) {
    throw BudgetExceeded(needed_, *budget_, std::nullopt, "The call, before its first micro-batch,",
                         live_with_gradients());
  }
  try {
    planner().ran_out_of_memory(needed_);
  } catch (const BudgetExceeded&) {
    if (coupling_) std::rethrow_exception(coupling_);
    throw;
  }
}

}  // namespace infinitybatch
