// What a VirtualBatch does about an attempt that has failed: the answers of `recovery_table`.
#include "core/exception_text.hpp"
#include "offload/absence.hpp"
#include "step/options.hpp"
#include "step/virtual_batch_state.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

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

bool VirtualBatch::State::answer(Setup& setup, const std::optional<int64_t>& budget,
                                 const memory::Limit* limit) {
  const std::exception_ptr& error = failed_.error;
  Failure& failure = failed_.failure;
  if (failure == Failure::out_of_memory && (!limit || !is_of_our_sizes(*limit, options_))) {
    failure = Failure::other;
  }
  if (failure == Failure::other) raise_explained(setup, budget);
  needed_ = limit != nullptr ? limit->refused() : 0;
  if (failure == Failure::out_of_memory && setup.strategy.checkpoints()) {
    failure = failed_in_loss_ ? Failure::loss_out_of_memory : Failure::segment_out_of_memory;
  }
  // Cuts of a fixed size are no answer to coupled samples a second time.
  const bool settled =
      failure == Failure::coupling && options_.micro_batch_size && setup.strategy.is_cut();
  const bool runs_again = failure != Failure::no_plan && failure != Failure::no_room_to_look &&
                          failure != Failure::no_room_to_offload && failure != Failure::other;
  if (runs_again && !settled) check_inputs();
  if (const auto found = recover(failure, answers(setup, budget))) return is_restart(*found);
  switch (failure) {
    case Failure::other_segments:
      refuse_given_segments("give micro_batch_size");
    case Failure::coupling:
      std::rethrow_exception(knowledge_->why_coupled ? knowledge_->why_coupled : error);
    case Failure::no_plan:
    case Failure::out_of_memory:
      refuse_budget(failed_, knowledge_->few_rows, setup.problem.batch_size());
    case Failure::segment_out_of_memory:
    case Failure::loss_out_of_memory:
      give_up_checkpoints(
          std::max(needed_, *budget + 1), *budget,
          failed_in_loss_
              ? "the loss on the outputs of all " + std::to_string(setup.problem.batch_size()) +
                    " samples"
              : "the smallest segment of a single sample, beside what waits for it and the "
                "gradients of the parameters");
    default:
      std::rethrow_exception(error);
  }
}

Answers VirtualBatch::State::answers(Setup& setup, const std::optional<int64_t>& budget) {
  Answers answers{
      {Answer::rerun_forwards, [&] { return begin_reruns(setup); }},
      {Answer::record_anew, [] { return true; }},
      {Answer::follow_segments, [&] { return follow_segments(setup); }},
      {Answer::cut, [&] { return begin_cuts(setup); }},
      {Answer::stop_cutting, [&] { return end_cuts(setup); }},
      {Answer::whole_batch, [&] { return begin_whole_batch(setup); }},
      {Answer::larger_micro_batches, [&] { return begin_larger(setup); }},
      {Answer::copy_in_turn, [&] { return begin_turns(setup); }},
      {Answer::smaller_micro_batches, [&] { return plan_smaller(*budget); }},
      {Answer::second_forwards, [this] { return give_up_graphs(); }},
      {Answer::recompute, [&] { return begin_recompute(setup, budget); }},
      {Answer::offload, [&] { return begin_offload(setup); }},
      {Answer::checkpoint, [&] { return begin_checkpoints(setup); }},
  };
  if (!memory_->checkpoints) return answers;
  CheckpointPlanner* const segments = &*memory_->checkpoints;
  answers[Answer::smaller_segments] = [segments] { return segments->ran_out_of_memory(); };
  answers[Answer::forward_again] = [&, segments] { return begin_again(setup, *segments); };
  answers[Answer::forget_frontiers] = [this, segments] { return begin_forgetting(*segments); };
  return answers;
}

bool VirtualBatch::State::begin_reruns(Setup& setup) {
  use_tapes_ = false;
  setup.strategy.second_forward = Strategy::SecondForward::rerun_after_mismatch;
  return true;
}

bool VirtualBatch::State::follow_segments(Setup& setup) {
  segments_ = failed_.segments;
  memory_->boundaries.reset();
  keep_all_boundaries(setup);
  return ++segments_changed_ <= 3;
}

/// What other errors mean, where a step knows it.
void VirtualBatch::State::raise_explained(const Setup& setup,
                                          const std::optional<int64_t>& budget) {
  const std::exception_ptr& error = failed_.error;
  if (setup.strategy.checkpoints() && streamed_) {
    try {
      std::rethrow_exception(error);
    } catch (const Unsupported& unsupported) {
      if (options_.checkpoint_segments) throw;
      check_inputs();
      give_up_checkpoints(
          *budget + 1, *budget,
          std::string("a single sample (") + unsupported.what_without_backtrace() + ")");
    } catch (...) {
      if (refuses_one_sample(error)) {
        check_inputs();
        memory_->checkpoints.reset();
        std::rethrow_exception(std::exchange(streamed_, nullptr));
      }
    }
  }
  const std::string text = first_line_of(error);
  if (offload::tells_of_absence(text)) throw StateError(text.substr(text.find(offload::kAbsent)));
}

bool VirtualBatch::State::plan_smaller(int64_t budget) {
  try {
    refuse_smaller(budget);
    return true;
  } catch (const BudgetExceeded& refusal) {
    failed_.refusal = refusal;
    return false;
  }
}

/// Makes the planner plan smaller. \throws BudgetExceeded, what the user should see, where it
/// cannot
void VirtualBatch::State::refuse_smaller(int64_t budget) {
  const int64_t needed = needed_;
  if (options_.micro_batch_size) {
    throw BudgetExceeded(needed, budget, std::nullopt, given_size(options_));
  }
  if (!planning_) {
    throw BudgetExceeded(std::max(needed, budget + 1), budget, std::nullopt,
                         "The step, before its first micro-batch,");
  }
  try {
    planner_.ran_out_of_memory(needed, failed_in_loss_);
  } catch (const BudgetExceeded&) {
    if (knowledge_->why_coupled) std::rethrow_exception(knowledge_->why_coupled);
    throw;
  }
}

bool VirtualBatch::State::begin_checkpoints(Setup& setup) {
  const bool possible = !options_.micro_batch_size && !options_.static_graph &&
                        options_.use_tapes && setup.problem.exact_coupling &&
                        !knowledge_->why_coupled && planner_.smallest_failed() && !failed_in_loss_;
  if (!possible || setup.strategy.checkpoints()) return false;
  keep_all_boundaries(setup);
  streamed_ = failed_.refusal ? std::make_exception_ptr(*failed_.refusal) : failed_.error;
  setup.strategy.cut(setup.strategy.is_cut(), /*for_memory=*/true);
  memory_->checkpoints.reset();
  // With less in each segment what waits may fit.
  memory_->offloads = false;
  const bool offloads = options_.offload.when == Offload::When::always;
  setup.strategy.offload = offloads ? Strategy::Offloads::boundaries : Strategy::Offloads::nothing;
  return true;
}

void VirtualBatch::State::end_checkpoints(Setup& setup) {
  memory_->checkpoints.reset();
  memory_->offloads = false;
  setup.strategy.cut(!setup.strategy.per_micro_batch(), /*for_memory=*/false);
  setup.strategy.offload = Strategy::Offloads::nothing;
}

void VirtualBatch::State::give_up_checkpoints(int64_t needed, int64_t budget,
                                              const std::string& what) {
  memory_->checkpoints.reset();
  std::optional<int64_t> smallest;
  try {
    if (streamed_) std::rethrow_exception(std::exchange(streamed_, nullptr));
  } catch (const BudgetExceeded& error) {
    // Known to work, if not the least that would.
    smallest = error.smallest_feasible();
    if (smallest) needed = error.needed();
  }
  throw BudgetExceeded(needed, budget, smallest, what);
}

bool VirtualBatch::State::begin_again(const Setup& setup, CheckpointPlanner& planner) const {
  const bool offloads = options_.offload.when != Offload::When::never;
  if (setup.problem.loss.coupled() == nullptr || !setup.strategy.per_micro_batch() ||
      planner.again || planner.forget || offloads)
    return false;
  planner.begin_again();
  return true;
}

bool VirtualBatch::State::begin_recompute(Setup& setup, const std::optional<int64_t>& budget) {
  const bool possible = budget && setup.strategy.cuts == Strategy::Cuts::whole_batch_ops &&
                        !setup.strategy.offloads() && memory_->boundaries &&
                        options_.offload.when == Offload::When::never &&
                        options_.retained_micro_batches == 0 &&
                        (options_.micro_batch_size || planner_.smallest_failed());
  if (!possible || !keep_fewer_boundaries(setup, *budget)) return false;
  memory_->kept = setup.strategy.kept;
  return true;
}

bool VirtualBatch::State::begin_offload(Setup& setup) {
  const bool fixed = options_.micro_batch_size || setup.strategy.checkpoints();
  const bool possible = (setup.strategy.is_cut() || keeps_graphs(setup.problem, setup.strategy)) &&
                        options_.offload.when != Offload::When::never &&
                        (fixed || planner_.smallest_failed());
  if (!possible || setup.strategy.offloads()) return false;
  keep_all_boundaries(setup);
  memory_->offloads = true;
  setup.strategy.offload = keeps_graphs(setup.problem, setup.strategy)
                               ? Strategy::Offloads::graphs
                               : Strategy::Offloads::boundaries;
  return true;
}

bool VirtualBatch::State::begin_turns(const Setup& setup) {
  return options_.micro_batch_size && setup.strategy.offloads() && plan_.overlaps &&
         !std::exchange(memory_->in_turn, true);
}

bool VirtualBatch::State::begin_forgetting(CheckpointPlanner& planner) const {
  const bool offloads = options_.offload.when != Offload::When::never;
  if (planner.forget || offloads || options_.checkpoint_segments) return false;
  planner.begin_forgetting();
  return true;
}

bool VirtualBatch::State::begin_cuts(Setup& setup) {
  if (setup.strategy.checkpoints()) {
    if (options_.checkpoint_segments && !setup.strategy.per_micro_batch()) return false;
    // The layer was not met before memory ran out, or is met for the first time.
    end_checkpoints(setup);
  }
  const bool possible = !setup.strategy.is_cut() && setup.problem.exact_coupling &&
                        !knowledge_->uncut && !coupled_beyond_cuts_;
  if (!possible) return false;
  cut_[setup.problem.training] = true;
  setup.strategy.cut(/*at_whole_batch_ops=*/true, options_.checkpoint_segments.has_value());
  const bool offloads = setup.strategy.offloads() || options_.offload.when == Offload::When::always;
  setup.strategy.offload = offloads ? Strategy::Offloads::boundaries : Strategy::Offloads::nothing;
  return true;
}

bool VirtualBatch::State::end_cuts(Setup& setup) {
  const bool fixed = options_.micro_batch_size || options_.static_graph;
  if (!setup.strategy.is_cut() || fixed || setup.strategy.checkpoints()) return false;
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  knowledge_->why_coupled = failed_.error;
  knowledge_->uncut = true;
  cut_[setup.problem.training] = false;
  setup.strategy.cuts = Strategy::Cuts::none;
  return true;
}

bool VirtualBatch::State::begin_whole_batch(const Setup& setup) {
  if (setup.strategy.checkpoints()) return false;
  if (!knowledge_->why_coupled) knowledge_->why_coupled = failed_.error;
  // The whole batch as one micro-batch couples nothing.
  const bool possible = !options_.micro_batch_size && planner_.whole_batch_may_fit();
  return possible && !std::exchange(knowledge_->whole, true);
}

bool VirtualBatch::State::begin_larger(const Setup& setup) {
  if (!planning_ || inputs_written_ || setup.strategy.checkpoints()) return false;
  return knowledge_->few_rows.meet(failed_rows_, setup.problem.batch_size(), failed_.error);
}

}  // namespace infinitybatch
