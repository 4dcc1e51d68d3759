#include "step/step_answers.hpp"

#include "core/exception_text.hpp"
#include "offload/absence.hpp"
#include "step/kept_boundaries.hpp"
#include "step/options.hpp"
#include "step/sorted_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

/// A BatchNorm in a C++ module refuses a micro-batch of one sample by itself.
bool refuses_one_sample(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    return what.find("Expected more than 1 value per channel") != std::string::npos;
  } catch (...) {
    return false;
  }
}

/// The user's own error says nothing of our sizes. A fixed size cannot be answered by a smaller
/// one: there even what the system refused comes back as it is.
bool is_of_our_sizes(const memory::Limit& limit, const Options& options) {
  return limit.allocation_failed() && !(options.micro_batch_size && limit.refused() == 0);
}

}  // namespace

bool StepAnswers::answer(Setup& setup, const std::optional<int64_t>& budget,
                         const memory::Limit* limit) {
  const Failed::Scope failed(failed_, std::current_exception());
  return respond(setup, budget, limit);
}

bool StepAnswers::respond(Setup& setup, const std::optional<int64_t>& budget,
                          const memory::Limit* limit) {
  const std::exception_ptr& error = failed_.error;
  Failure& failure = failed_.failure;
  if (failure == Failure::out_of_memory && (!limit || !is_of_our_sizes(*limit, facts_.options))) {
    failure = Failure::other;
  }
  // A given size stays, and what it gives cannot be joined.
  if (failure == Failure::not_joined && facts_.options.micro_batch_size) failure = Failure::other;
  if (failure == Failure::other) raise_explained(setup, budget);
  needed_ = limit != nullptr ? limit->refused() : 0;
  const Problem& problem = setup.problem;
  with_gradients_ =
      memory::live(problem.device) + gradient_bytes(problem.parameters, problem.device);
  if (failure == Failure::out_of_memory && setup.strategy.checkpoints()) {
    failure = facts_.attempt.failed_in_loss ? Failure::loss_out_of_memory
                                            : Failure::segment_out_of_memory;
  }
  // Cuts of a fixed size are no answer to coupled samples a second time.
  const bool settled =
      failure == Failure::coupling && facts_.options.micro_batch_size && setup.strategy.is_cut();
  const bool runs_again = failure != Failure::no_plan && failure != Failure::no_room_to_look &&
                          failure != Failure::no_room_to_offload && failure != Failure::other;
  if (runs_again && !settled) facts_.check_inputs();
  if (const auto found = recover(failure, answers(setup, budget))) return is_restart(*found);
  switch (failure) {
    case Failure::other_segments:
      refuse_given_segments("give micro_batch_size");
    case Failure::coupling:
      refuse_coupled(facts_.knowledge->why_coupled ? facts_.knowledge->why_coupled : error,
                     setup.problem);
    case Failure::no_plan:
    case Failure::out_of_memory:
      refuse_budget(failed_, facts_.knowledge->few_rows, setup.problem.batch_size());
    case Failure::segment_out_of_memory:
    case Failure::loss_out_of_memory:
      give_up_checkpoints(
          std::max(needed_, *budget + 1), *budget,
          facts_.attempt.failed_in_loss
              ? "the loss on the outputs of all " + std::to_string(setup.problem.batch_size()) +
                    " samples"
              : "the smallest segment of a single sample, beside what waits for it and the "
                "gradients of the parameters");
    default:
      std::rethrow_exception(error);
  }
}

Answers StepAnswers::answers(Setup& setup, const std::optional<int64_t>& budget) {
  Answers answers{
      {Answer::rerun_forwards, [&] { return begin_reruns(setup); }},
      {Answer::record_anew, [] { return true; }},
      {Answer::look_less,
       [this, &setup] {
         setup.resources.findings->rows_seen.most = failed_.looked_at / 2;
         return true;
       }},
      {Answer::follow_segments, [&] { return follow_segments(setup); }},
      {Answer::cut, [&] { return begin_cuts(setup); }},
      {Answer::stop_cutting, [&] { return end_cuts(setup); }},
      {Answer::whole_batch, [&] { return begin_whole_batch(setup); }},
      {Answer::larger_micro_batches, [&] { return begin_larger(setup); }},
      {Answer::copy_in_turn, [&] { return begin_turns(setup); }},
      {Answer::smaller_micro_batches, [&] { return plan_smaller(*budget); }},
      {Answer::second_forwards,
       [this] { return facts_.graph_choices.give_up(facts_.kind.shapes()); }},
      {Answer::recompute, [&] { return begin_recompute(setup, budget); }},
      {Answer::offload, [&] { return begin_offload(setup); }},
      {Answer::checkpoint, [&] { return begin_checkpoints(setup); }},
  };
  if (!facts_.memory->checkpoints) return answers;
  CheckpointPlanner* const segments = &*facts_.memory->checkpoints;
  answers[Answer::smaller_segments] = [segments] { return segments->ran_out_of_memory(); };
  answers[Answer::forward_again] = [&, segments] { return begin_again(setup, *segments); };
  answers[Answer::forget_frontiers] = [this, segments] { return begin_forgetting(*segments); };
  return answers;
}

bool StepAnswers::begin_reruns(Setup& setup) {
  facts_.use_tapes = false;
  setup.strategy.second_forward = Strategy::SecondForward::rerun_after_mismatch;
  return true;
}

bool StepAnswers::follow_segments(Setup& setup) {
  facts_.segments = failed_.segments;
  facts_.memory->boundaries.reset();
  facts_.keep_all_boundaries(setup);
  return ++segments_changed_ <= 3;
}

void StepAnswers::raise_explained(const Setup& setup, const std::optional<int64_t>& budget) {
  const std::exception_ptr& error = failed_.error;
  if (setup.strategy.checkpoints() && streamed_) {
    try {
      std::rethrow_exception(error);
    } catch (const Unsupported& unsupported) {
      if (facts_.options.checkpoint_segments) throw;
      facts_.check_inputs();
      give_up_checkpoints(
          *budget + 1, *budget,
          std::string("a single sample (") + unsupported.what_without_backtrace() + ")");
    } catch (...) {
      if (refuses_one_sample(error)) {
        facts_.check_inputs();
        facts_.memory->checkpoints.reset();
        std::rethrow_exception(std::exchange(streamed_, nullptr));
      }
    }
  }
  const std::string text = first_line_of(error);
  if (offload::tells_of_absence(text)) throw StateError(text.substr(text.find(offload::kAbsent)));
}

bool StepAnswers::plan_smaller(int64_t budget) {
  try {
    refuse_smaller(budget);
    return true;
  } catch (const BudgetExceeded& refusal) {
    failed_.refusal = refusal;
    return false;
  }
}

void StepAnswers::refuse_smaller(int64_t budget) {
  const int64_t needed = needed_;
  if (facts_.options.micro_batch_size) {
    throw BudgetExceeded(needed, budget, std::nullopt, given_size(facts_.options), with_gradients_);
  }
  if (!facts_.attempt.planning) {
    throw BudgetExceeded(std::max(needed, budget + 1), budget, std::nullopt,
                         "The step, before its first micro-batch,", with_gradients_);
  }
  try {
    facts_.planner.ran_out_of_memory(needed, facts_.attempt.failed_in_loss);
  } catch (const BudgetExceeded&) {
    if (facts_.knowledge->why_coupled) std::rethrow_exception(facts_.knowledge->why_coupled);
    throw;
  }
}

bool StepAnswers::begin_checkpoints(Setup& setup) {
  const bool possible = !facts_.options.micro_batch_size && !facts_.options.static_graph &&
                        facts_.options.use_tapes && setup.problem.exact_coupling &&
                        !facts_.knowledge->why_coupled && facts_.planner.smallest_failed() &&
                        !facts_.attempt.failed_in_loss;
  if (!possible || setup.strategy.checkpoints()) return false;
  facts_.keep_all_boundaries(setup);
  streamed_ = failed_.refusal ? std::make_exception_ptr(*failed_.refusal) : failed_.error;
  setup.strategy.cut(setup.strategy.is_cut(), /*for_memory=*/true);
  facts_.memory->checkpoints.reset();
  // With less in each segment what waits may fit.
  facts_.memory->offloads = false;
  const bool offloads = facts_.options.offload.when == Offload::When::always;
  setup.strategy.offload = offloads ? Strategy::Offloads::boundaries : Strategy::Offloads::nothing;
  return true;
}

void StepAnswers::end_checkpoints(Setup& setup) {
  facts_.memory->checkpoints.reset();
  facts_.memory->offloads = false;
  setup.strategy.cut(!setup.strategy.per_micro_batch(), /*for_memory=*/false);
  setup.strategy.offload = Strategy::Offloads::nothing;
}

void StepAnswers::give_up_checkpoints(int64_t needed, int64_t budget, const std::string& what) {
  facts_.memory->checkpoints.reset();
  std::optional<int64_t> smallest;
  try {
    if (streamed_) std::rethrow_exception(std::exchange(streamed_, nullptr));
  } catch (const BudgetExceeded& error) {
    // Known to work, if not the least that would.
    smallest = error.smallest_feasible();
    if (smallest) needed = error.needed();
  }
  throw BudgetExceeded(needed, budget, smallest, what, with_gradients_);
}

bool StepAnswers::begin_again(const Setup& setup, CheckpointPlanner& planner) const {
  const bool offloads = facts_.options.offload.when != Offload::When::never;
  if (setup.problem.loss.coupled() == nullptr || !setup.strategy.per_micro_batch() ||
      planner.again || planner.forget || offloads)
    return false;
  planner.begin_again();
  return true;
}

bool StepAnswers::begin_recompute(Setup& setup, const std::optional<int64_t>& budget) {
  const bool possible = budget && setup.strategy.cuts == Strategy::Cuts::whole_batch_ops &&
                        !setup.strategy.offloads() && facts_.memory->boundaries &&
                        facts_.options.offload.when == Offload::When::never &&
                        facts_.options.retained_micro_batches == 0 &&
                        (facts_.options.micro_batch_size || facts_.planner.smallest_failed());
  if (!possible) return false;
  BoundaryShortage shortage{*facts_.memory->boundaries, facts_.planner, setup.problem.batch_size(),
                            *budget};
  if (facts_.options.micro_batch_size) {
    shortage.most = *budget - memory::live(setup.problem.device);
  }
  if (!keep_fewer(setup.strategy.kept, shortage)) return false;
  facts_.memory->kept = setup.strategy.kept;
  return true;
}

bool StepAnswers::begin_offload(Setup& setup) {
  const bool fixed = facts_.options.micro_batch_size || setup.strategy.checkpoints();
  const bool possible =
      (setup.strategy.is_cut() || facts_.keeps_graphs(setup.problem, setup.strategy)) &&
      facts_.options.offload.when != Offload::When::never &&
      (fixed || facts_.planner.smallest_failed());
  if (!possible || setup.strategy.offloads()) return false;
  facts_.keep_all_boundaries(setup);
  facts_.memory->begin_offload();
  setup.strategy.offload = facts_.keeps_graphs(setup.problem, setup.strategy)
                               ? Strategy::Offloads::graphs
                               : Strategy::Offloads::boundaries;
  return true;
}

bool StepAnswers::begin_turns(const Setup& setup) {
  return facts_.options.micro_batch_size && setup.strategy.offloads() && facts_.plan.overlaps &&
         !std::exchange(facts_.memory->in_turn, true);
}

bool StepAnswers::begin_forgetting(CheckpointPlanner& planner) const {
  const bool offloads = facts_.options.offload.when != Offload::When::never;
  if (planner.forget || offloads || facts_.options.checkpoint_segments) return false;
  planner.begin_forgetting();
  return true;
}

bool StepAnswers::begin_cuts(Setup& setup) {
  if (setup.strategy.checkpoints()) {
    if (facts_.options.checkpoint_segments && !setup.strategy.per_micro_batch()) return false;
    // The layer was not met before memory ran out, or is met for the first time.
    end_checkpoints(setup);
  }
  const bool possible = !setup.strategy.is_cut() && setup.problem.exact_coupling &&
                        !facts_.knowledge->uncut && !facts_.attempt.coupled_beyond_cuts;
  if (!possible) return false;
  facts_.cut[setup.problem.training] = true;
  setup.strategy.cut(/*at_whole_batch_ops=*/true, facts_.options.checkpoint_segments.has_value());
  const bool offloads =
      setup.strategy.offloads() || facts_.options.offload.when == Offload::When::always;
  setup.strategy.offload = offloads ? Strategy::Offloads::boundaries : Strategy::Offloads::nothing;
  return true;
}

bool StepAnswers::end_cuts(Setup& setup) {
  const bool fixed = facts_.options.micro_batch_size || facts_.options.static_graph;
  if (!setup.strategy.is_cut() || fixed || setup.strategy.checkpoints()) return false;
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  facts_.knowledge->why_coupled = failed_.error;
  facts_.knowledge->uncut = true;
  facts_.cut[setup.problem.training] = false;
  setup.strategy.cuts = Strategy::Cuts::none;
  return true;
}

bool StepAnswers::begin_whole_batch(const Setup& setup) {
  if (setup.strategy.checkpoints()) return false;
  if (!facts_.knowledge->why_coupled) facts_.knowledge->why_coupled = failed_.error;
  // The whole batch as one micro-batch couples nothing.
  const bool possible = !facts_.options.micro_batch_size && !setup.problem.is_reordered() &&
                        facts_.planner.whole_batch_may_fit();
  return possible && !std::exchange(facts_.knowledge->whole, true);
}

bool StepAnswers::begin_larger(const Setup& setup) {
  if (!facts_.attempt.planning || facts_.attempt.inputs_written || setup.strategy.checkpoints())
    return false;
  return facts_.knowledge->few_rows.meet(facts_.attempt.failed_rows, setup.problem.batch_size(),
                                         failed_.error);
}

}  // namespace infinitybatch
