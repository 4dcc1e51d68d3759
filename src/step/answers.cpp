// What a VirtualBatch does about an attempt that has failed: the answers of `recovery_table`.
#include "core/exception_text.hpp"
#include "offload/absence.hpp"
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

/// The user's own error says nothing of our sizes. A fixed size cannot be answered by a smaller one:
/// there even what the system refused comes back as it is.
bool is_of_our_sizes(const memory::Limit& limit, const Options& options) {
  return limit.allocation_failed() && !(options.micro_batch_size && limit.refused() == 0);
}

}  // namespace

bool VirtualBatch::State::answer(Job& job, const std::optional<int64_t>& budget,
                                 const memory::Limit* limit) {
  const std::exception_ptr& error = failed_.error;
  Failure& failure = failed_.failure;
  if (failure == Failure::out_of_memory && (!limit || !is_of_our_sizes(*limit, options_))) {
    failure = Failure::other;
  }
  if (failure == Failure::other) raise_explained(job, budget);
  needed_ = limit != nullptr ? limit->refused() : 0;
  if (failure == Failure::out_of_memory && job.checkpoints != nullptr) {
    failure = failed_in_loss_ ? Failure::loss_out_of_memory : Failure::segment_out_of_memory;
  }
  // Cuts of a fixed size are no answer to coupled samples a second time.
  const bool settled = failure == Failure::coupling && options_.micro_batch_size && job.cut;
  const bool runs_again = failure != Failure::no_plan && failure != Failure::no_room_to_look &&
                          failure != Failure::no_room_to_offload && failure != Failure::other;
  if (runs_again && !settled) check_inputs();
  const auto found = recover(failure, [&](Answer each) { return apply(each, job, budget); });
  if (found) return is_restart(*found);
  switch (failure) {
    case Failure::other_segments:
      throw CouplingError("aten::batch_norm",
                          "the model does not run its layers that see the whole batch equally "
                          "often each time; give micro_batch_size, put them into eval mode, or "
                          "accept another gradient with batch_coupling=\"per_micro_batch\"");
    case Failure::coupling:
      std::rethrow_exception(knowledge_->why_coupled ? knowledge_->why_coupled : error);
    case Failure::no_plan:
    case Failure::out_of_memory:
      refuse_budget(job);
    case Failure::segment_out_of_memory:
    case Failure::loss_out_of_memory:
      give_up_checkpoints(
          std::max(needed_, *budget + 1), *budget,
          failed_in_loss_
              ? "the loss on the outputs of all " + std::to_string(job.batch_size()) + " samples"
              : "the smallest segment of a single sample, beside what waits for it and the "
                "gradients of the parameters");
    default:
      std::rethrow_exception(error);
  }
}

bool VirtualBatch::State::apply(Answer answer, Job& job, const std::optional<int64_t>& budget) {
  CheckpointPlanner* const segments = memory_->checkpoints ? &*memory_->checkpoints : nullptr;
  switch (answer) {
    case Answer::rerun_forwards:
      use_tapes_ = job.use_tapes = false;
      job.tapes_failed = true;
      return true;
    case Answer::record_anew:
      return true;
    case Answer::follow_segments:
      segments_ = failed_.segments;
      return ++segments_changed_ <= 3;
    case Answer::cut:
      return begin_cuts(job);
    case Answer::stop_cutting:
      return end_cuts(job);
    case Answer::whole_batch:
      return begin_whole_batch(job);
    case Answer::larger_micro_batches:
      return begin_larger(job);
    case Answer::drop_graphs:
      return false;  // nobody else keeps any
    case Answer::copy_in_turn:
      return begin_turns(job);
    case Answer::smaller_micro_batches:
      return plan_smaller(*budget);
    case Answer::second_forwards:
      return give_up_graphs();
    case Answer::offload:
      return begin_offload(job);
    case Answer::checkpoint:
      return begin_checkpoints(job);
    case Answer::smaller_segments:
      return segments->ran_out_of_memory();
    case Answer::forward_again:
      return begin_again(job, *segments);
    case Answer::forget_frontiers:
      return begin_forgetting(*segments);
  }
  return false;
}

/// What other errors mean, where a step knows it.
void VirtualBatch::State::raise_explained(const Job& job, const std::optional<int64_t>& budget) {
  const std::exception_ptr& error = failed_.error;
  if (job.checkpoints != nullptr && streamed_) {
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

/// Makes the planner plan smaller. \throws BudgetExceeded, what the user should see, where it cannot
void VirtualBatch::State::refuse_smaller(int64_t budget) {
  const int64_t needed = needed_;
  if (options_.micro_batch_size) {
    throw BudgetExceeded(needed, budget, std::nullopt,
                         "micro_batch_size=" + std::to_string(*options_.micro_batch_size));
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

bool VirtualBatch::State::begin_checkpoints(Job& job) {
  const bool possible = !options_.micro_batch_size && !options_.static_graph &&
                        options_.use_tapes && job.exact_coupling && !knowledge_->why_coupled &&
                        planner_.smallest_failed() && !failed_in_loss_;
  if (!possible || job.checkpoints != nullptr) return false;
  streamed_ = failed_.refusal ? std::make_exception_ptr(*failed_.refusal) : failed_.error;
  job.alone = !job.cut;
  job.cut = true;
  job.checkpoints = &memory_->checkpoints.emplace();
  // With less in each segment what waits may fit.
  memory_->offloads = false;
  const bool offloads = options_.offload.when == Offload::When::always;
  job.store = offloads ? store(job.device) : nullptr;
  return true;
}

void VirtualBatch::State::end_checkpoints(Job& job) {
  memory_->checkpoints.reset();
  memory_->offloads = false;
  job.checkpoints = nullptr;
  job.store = nullptr;
  if (job.alone) job.cut = false;
  job.alone = false;
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

bool VirtualBatch::State::begin_again(const Job& job, CheckpointPlanner& planner) const {
  const bool offloads = options_.offload.when != Offload::When::never;
  if (job.coupled == nullptr || !job.alone || planner.again || planner.forget || offloads)
    return false;
  planner.begin_again();
  return true;
}

bool VirtualBatch::State::begin_offload(Job& job) {
  const bool fixed = options_.micro_batch_size || job.checkpoints != nullptr;
  const bool possible = (job.cut || keeps_graphs(job)) &&
                        options_.offload.when != Offload::When::never &&
                        (fixed || planner_.smallest_failed());
  if (!possible || job.store != nullptr) return false;
  memory_->offloads = true;
  job.store = store(job.device);
  job.offloads_graphs = keeps_graphs(job);
  return true;
}

bool VirtualBatch::State::begin_turns(const Job& job) {
  return options_.micro_batch_size && job.store != nullptr && plan_.overlaps &&
         !std::exchange(memory_->in_turn, true);
}

bool VirtualBatch::State::begin_forgetting(CheckpointPlanner& planner) const {
  const bool offloads = options_.offload.when != Offload::When::never;
  if (planner.forget || offloads || options_.checkpoint_segments) return false;
  planner.begin_forgetting();
  return true;
}

bool VirtualBatch::State::begin_cuts(Job& job) {
  if (job.checkpoints != nullptr) {
    if (options_.checkpoint_segments && !job.alone) return false;
    // The layer was not met before memory ran out, or is met for the first time.
    end_checkpoints(job);
  }
  const bool possible =
      !job.cut && job.exact_coupling && !knowledge_->uncut && !coupled_beyond_cuts_;
  if (!possible) return false;
  job.cut = cut_[job.training] = true;
  job.offloads_graphs = false;
  if (options_.offload.when == Offload::When::always) job.store = store(job.device);
  if (options_.checkpoint_segments) job.checkpoints = &memory_->checkpoints.emplace();
  return true;
}

bool VirtualBatch::State::end_cuts(Job& job) {
  const bool fixed = options_.micro_batch_size || options_.static_graph;
  if (!job.cut || fixed || job.checkpoints != nullptr) return false;
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  knowledge_->why_coupled = failed_.error;
  knowledge_->uncut = true;
  job.cut = cut_[job.training] = false;
  return true;
}

bool VirtualBatch::State::begin_whole_batch(const Job& job) {
  if (job.checkpoints != nullptr) return false;
  if (!knowledge_->why_coupled) knowledge_->why_coupled = failed_.error;
  // The whole batch as one micro-batch couples nothing.
  const bool possible = !options_.micro_batch_size && planner_.whole_batch_may_fit();
  return possible && !std::exchange(knowledge_->whole, true);
}

bool VirtualBatch::State::begin_larger(const Job& job) {
  if (!planning_ || inputs_written_ || job.checkpoints != nullptr) return false;
  return knowledge_->few_rows.meet(failed_rows_, job.batch_size(), failed_.error);
}

void VirtualBatch::State::refuse_budget(const Job& job) {
  if (knowledge_->few_rows.failing() != 0) {
    knowledge_->few_rows.refuse(job.batch_size(), *failed_.refusal);
  }
  if (failed_.failure == Failure::no_plan) std::rethrow_exception(failed_.error);
  throw *failed_.refusal;
}

}  // namespace infinitybatch
