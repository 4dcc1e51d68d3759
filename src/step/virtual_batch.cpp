#include <infinitybatch/step/virtual_batch.hpp>

#include "meter.hpp"
#include "offload.hpp"
#include "virtual_batch_state.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/exception_text.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/pinned_copies.hpp>
#include <infinitybatch/core/rng.hpp>
#include <infinitybatch/coupled/random_draw.hpp>
#include <infinitybatch/memory/foreign_storage.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/offload/absence.hpp>
#include <infinitybatch/offload/store.hpp>
#include <infinitybatch/plan/checkpoint_planner.hpp>
#include <infinitybatch/plan/planner.hpp>
#include <infinitybatch/step/admission.hpp>
#include <infinitybatch/tape/mismatch.hpp>
#include <infinitybatch/tape/witness.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

using Clock = std::chrono::steady_clock;

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

}  // namespace

StaticTapes* VirtualBatch::State::static_tapes(const Job& job) const {
  StaticTapes& tapes = static_tapes_[signature_of(job) + program_kind_of(job)];
  std::vector<const void*> owned = owned_by(job);
  if (tapes.owned != owned) tapes = StaticTapes{{}, std::move(owned)};
  return &tapes;
}

std::string VirtualBatch::State::program_of(const Job& job) const {
  return Programs::identity(model_, job.inputs->arguments);
}

void VirtualBatch::State::forget_programs() const {
  programs_.clear();
  static_tapes_.clear();
  draw_laws_.clear();
  output_laws_.clear();
  examined_.clear();
  rows_seen_.clear();
  checked_.clear();
  couplings_.clear();
  few_rows_.clear();
}

Job VirtualBatch::State::job(const BatchSource& inputs, const BatchSource& targets) const {
  Job job;
  job.model = &model_;
  job.loss = std::get_if<SeparableLoss>(&loss_);
  job.coupled = std::get_if<CoupledLoss>(&loss_);
  job.use_tapes = use_tapes_;
  job.tapes_failed = options_.use_tapes && !use_tapes_;
  job.inputs = &inputs;
  job.targets = &targets;
  job.exact_coupling = options_.batch_coupling == BatchCoupling::exact;
  job.keep_outputs = options_.keep_outputs;
  job.on_micro_batch = options_.on_micro_batch;
  job.interrupt = options_.interrupt;
  if (options_.loss_scale) job.loss_scale = options_.loss_scale();
  admit(job);
  job.cut = cut_[job.training];
  if (programs_.full()) forget_programs();
  job.program = programs_.number(program_of(job));
  if (options_.static_graph) {
    job.cut = true;
    job.static_tapes = static_tapes(job);
  }
  const bool checkpointed = !checkpoints_.empty() && checkpoints_.contains(signature_of(job));
  if (!options_.static_graph && (options_.checkpoint_segments || checkpointed)) {
    job.alone = !job.cut;
    job.cut = true;
    job.checkpoints = &checkpoints_[signature_of(job)];
  }
  const bool waits = job.cut || job.coupled != nullptr;
  const bool offloads = options_.offload.when == Offload::When::always ||
                        ((job.cut || keeps_graphs(job)) && offloaded_.contains(signature_of(job)));
  if (waits && offloads) job.store = store(job.device);
  job.offloads_graphs = job.store != nullptr && keeps_graphs(job);
  if (job.coupled != nullptr) job.output_law = &output_laws_[program_kind_of(job)];
  if (job.cut) job.check_recordings = !checked_.contains(program_kind_of(job));
  if (job.exact_coupling && job.use_tapes) job.examined = &examined_[program_kind_of(job)];
  if (job.exact_coupling) job.rows_seen = &rows_seen_[program_kind_of(job)];
  job.renormed = &renormed_;
  job.match_native_rng = options_.match_native_rng;
  if (job.match_native_rng) job.draw_laws = &draw_laws_[kind_of_draws(job)];
  return job;
}

StepReport VirtualBatch::State::step(const BatchSource& inputs, const BatchSource& targets,
                                     bool hand_out) {
  const Clock::time_point start = Clock::now();
  const PinnedCopies copies;
  const PlainNumbers::Scope remembering(numbers_);
  Job job = this->job(inputs, targets);
  const memory::ForeignStorages counted(reachable_tensors(job));
  const memory::PeakScope peak(job.device);
  std::optional<int64_t> budget;
  if (options_.memory_budget) budget = options_.memory_budget->resolve(job.device);
  if (const int64_t live = memory::stats(job.device).live; budget && live > *budget) {
    throw BudgetExceeded(
        live, *budget, std::nullopt,
        "What is allocated before the step (parameters, gradients, optimizer state, inputs)");
  }

  // A step that fails leaves them as they were: what it refuses, the next one refuses too.
  bool* const examined = job.examined;
  bool examined_now = examined != nullptr && *examined;
  if (examined != nullptr) job.examined = &examined_now;
  RowsSeen* const rows_seen = job.rows_seen;
  RowsSeen rows_seen_now = rows_seen != nullptr ? *rows_seen : RowsSeen();
  if (rows_seen != nullptr) job.rows_seen = &rows_seen_now;
  int changes = 0;  // of the number of segments
  beside_plan_ = false;
  collective_.reset();
  const FewRows::Step few_rows(few_rows_);
  for (int64_t restarts = 0;; ++restarts) {
    if (collective_) {
      throw Unsupported(
          "the step has to begin again, after memory ran out or a replay gave other outputs, but "
          "its loss has talked to other ranks (" +
          *collective_ +
          "), who would not answer a second time; give every rank a micro_batch_size, or skip this "
          "step on all of them: the next one is planned with what was learned");
    }
    // The CPU's limit is enforced; an accelerator's is kept by the plan, and looked at after each
    // instruction. One for each attempt, so that it tells what failed in this one.
    std::optional<memory::Limit> limit;
    if (budget) limit.emplace(*budget, job.device);
    try {
      StepReport report = attempt(job, budget, hand_out);
      programs_.left(program_of(job));
      if (examined != nullptr) *examined = examined_now;
      if (rows_seen != nullptr) *rows_seen = std::move(rows_seen_now);
      report.peak_bytes = peak.peak();
      // Of the plan alone, which says nothing of a rehearsal, a look at rows or an attempt that
      // took more.
      const auto& predicted = report.predicted_peak_bytes;
      const bool beside = beside_plan_ || restarts > 0;
      if (beside && report.peak_bytes > predicted && own_peak_ <= predicted) {
        report.predicted_peak_bytes.reset();
      }
      if (job.store != nullptr) tell_offload(job, report);
      report.memory_budget = budget;
      report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      report.restarts = restarts;
      return report;
    } catch (const tape::Mismatch&) {
      check_inputs();
      // From now on this model's forward runs again instead.
      use_tapes_ = false;
      job.use_tapes = false;
      job.tapes_failed = true;
      job.examined = nullptr;
    } catch (const tape::OtherValues&) {
      check_inputs();  // each micro-batch is recorded from now on
    } catch (const SegmentsChanged& changed) {
      check_inputs();
      segments_ = changed.segments();
      --restarts;
      if (++changes > 3) {
        throw CouplingError("aten::batch_norm",
                            "the model does not run its layers that see the whole batch equally "
                            "often each time; give micro_batch_size, put them into eval mode, or "
                            "accept another gradient with batch_coupling=\"per_micro_batch\"");
      }
    } catch (const CouplingError&) {
      if (!options_.micro_batch_size || !job.cut) check_inputs();
      if (job.checkpoints != nullptr) {
        if (options_.checkpoint_segments && !job.alone) throw;
        // The layer was not met before memory ran out, or is met for the first time.
        end_checkpoints(job);
      }
      if (!answer_by_cuts(job)) answer_coupling(job);
      if (options_.checkpoint_segments) job.checkpoints = &checkpoints_[signature_of(job)];
      // Nothing has run out of memory: not a restart that the report should count.
      --restarts;
    } catch (const NoRoomToLook&) {
      throw;
    } catch (const BudgetExceeded& error) {
      if (!give_up_graphs(job) && !plan_smaller(job)) refuse_budget(job, error);
    } catch (const OffloadError&) {
      if (!give_up_graphs(job)) throw;
    } catch (const Unsupported& error) {
      if (job.checkpoints == nullptr || !streamed_ || options_.checkpoint_segments) throw;
      check_inputs();
      give_up_checkpoints(job, *budget + 1, *budget,
                          std::string("a single sample (") + error.what_without_backtrace() + ")");
    } catch (...) {
      if (const std::string text = first_line_of(std::current_exception());
          offload::tells_of_absence(text)) {
        throw StateError(text.substr(text.find(offload::kAbsent)));
      }
      if (streamed_ && job.checkpoints != nullptr && refuses_one_sample(std::current_exception())) {
        check_inputs();
        checkpoints_.erase(signature_of(job));
        std::rethrow_exception(std::exchange(streamed_, nullptr));
      }
      if (answer_few_rows(job)) {
        --restarts;  // nothing has run out of memory
        continue;
      }
      if (!budget || !is_out_of_memory(std::current_exception())) throw;
      // The user's own error says nothing of our sizes. A fixed size cannot be answered by a
      // smaller one: there even what the system refused comes back as it is.
      if (limit && !limit->allocation_failed()) throw;
      if (options_.micro_batch_size && limit && limit->refused() == 0) throw;
      check_inputs();
      const int64_t needed = limit->refused();
      if (job.checkpoints != nullptr) {
        if (checkpoint_smaller(job)) continue;
        give_up_checkpoints(
            job, std::max(needed, *budget + 1), *budget,
            failed_in_loss_
                ? "the loss on the outputs of all " + std::to_string(job.batch_size()) + " samples"
                : "the smallest segment of a single sample, beside what waits for "
                  "it and the gradients of the parameters");
      }
      if (begin_turns(job)) continue;
      try {
        answer_out_of_memory(job, needed, *budget);
      } catch (const BudgetExceeded& error) {
        if (!give_up_graphs(job) && !plan_smaller(job)) refuse_budget(job, error);
      }
    }
  }
}

StepReport VirtualBatch::State::attempt(const Job& job, const std::optional<int64_t>& budget,
                                        bool hand_out) {
  planning_ = false;
  coupled_beyond_cuts_ = false;
  failed_rows_ = 0;
  const RngSnapshot random = RngSnapshot::capture(devices_of(job));
  Job checked;
  std::optional<Executor> executor;
  try {
    StepReport report;
    inputs_written_ = false;
    checked = job;
    const bool rehearsed = (job.coupled != nullptr || job.cut) && job.checkpoints == nullptr;
    if (rehearsed && !options_.micro_batch_size) {
      checked.offloads_graphs = offloads_graphs(job);
      if (rehearse(checked, *budget)) checked.check_recordings = false;
      choose_graphs(job, *budget);
      checked.offloads_graphs = offloads_graphs(job);
      random.restore();
    }
    if (job.store != nullptr) offloaded_before_ = job.store->statistics();
    const memory::PeakScope own(job.device);
    executor.emplace(checked);
    if (!options_.micro_batch_size) executor->look_for_few_rows();
    if (job.checkpoints != nullptr) {
      follow_checkpoints(*executor, job, budget, hand_out, report);
    } else if (options_.micro_batch_size) {
      follow_fixed_size(*executor, job, hand_out, report);
    } else {
      follow_planner(*executor, checked, *budget, hand_out, report);
    }
    if (job.store != nullptr) {
      times_ = executor->times();
      graph_bytes_ = executor->graph_bytes();
    }
    if (!hand_out) {
      inputs_written_ = executor->wrote_inputs();
      executor->roll_back();
      random.restore();
      check_inputs();
    }
    const std::optional<int64_t> without_look = executor->peak_without_look();
    if (without_look) beside_plan_ = true;
    own_peak_ = without_look.value_or(own.peak());
    report.loss = executor->loss();
    report.outputs = executor->take_outputs();
    report.strategy = plan_.strategy;
    if (const auto opaque = executor->opaque()) {
      report.strategy = "rerun";
      report.strategy_reason = options_.use_tapes ? *opaque : "use_tapes=false was given";
    }
    return report;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    failed_in_loss_ = executor && executor->in_whole_loss();
    if (executor) {
      if (auto collective = executor->collective()) collective_ = std::move(collective);
      coupled_beyond_cuts_ = executor->coupled_beyond_cuts();
      failed_rows_ = executor->failed_rows();
      inputs_written_ = inputs_written_ || executor->wrote_inputs();
      executor->roll_back();
    }
    // Nobody has looked at recordings of a step that failed: what mixes samples is looked for in
    // recordings alone, and would not be met again.
    if (job.static_tapes != nullptr) job.static_tapes->by_rows.clear();
    random.restore();
    throw;
  }
}

void VirtualBatch::State::tell_offload(const Job& job, StepReport& report) {
  const offload::StoreStatistics& before = offloaded_before_;
  const offload::StoreStatistics now = job.store->statistics();
  const OffloadedMeanwhile offloaded(before, now);
  report.offloaded_bytes = offloaded.bytes;
  report.offload_seconds = offloaded.seconds;
  plan_.offloads = true;
  plan_.offloaded_bytes = report.offloaded_bytes;
  plan_.offload_seconds = report.offload_seconds;
  plan_.graph_bytes = graph_bytes_;
  if (!job.device.is_cpu()) return;
  times_.set_link(report.offloaded_bytes, now.seconds_out - before.seconds_out,
                  now.moved_back - before.moved_back, now.seconds_back - before.seconds_back);
  plan_.predicted_offload_seconds = simulate_copies(plan_, times_);
  // Copies so short that the store makes them itself: no thread wakes up as fast.
  if (report.offload_seconds.hidden <= 0) {
    CopySeconds& next = *plan_.predicted_offload_seconds;
    next = {0, next.hidden + next.waited};
  }
}

bool VirtualBatch::State::begin_checkpoints(Job& job) {
  const bool possible = !options_.micro_batch_size && !options_.static_graph &&
                        options_.use_tapes && job.exact_coupling && coupling_of(job) == nullptr &&
                        planner_.smallest_failed() && !failed_in_loss_;
  if (!possible || job.checkpoints != nullptr) return false;
  streamed_ = std::current_exception();
  job.alone = !job.cut;
  job.cut = true;
  job.checkpoints = &checkpoints_[signature_of(job)];
  // With less in each segment what waits may fit.
  offloaded_.erase(signature_of(job));
  const bool offloads = options_.offload.when == Offload::When::always;
  job.store = offloads ? store(job.device) : nullptr;
  return true;
}

void VirtualBatch::State::end_checkpoints(Job& job) {
  checkpoints_.erase(signature_of(job));
  offloaded_.erase(signature_of(job));
  job.checkpoints = nullptr;
  job.store = nullptr;
  if (job.alone) job.cut = false;
  job.alone = false;
}

void VirtualBatch::State::give_up_checkpoints(const Job& job, int64_t needed, int64_t budget,
                                              const std::string& what) {
  checkpoints_.erase(signature_of(job));
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

bool VirtualBatch::State::checkpoint_smaller(Job& job) {
  CheckpointPlanner& planner = checkpoints_[signature_of(job)];
  // Beside the loss of all outputs there is only what waits.
  if (failed_in_loss_) return begin_offload(job) || begin_again(job, planner);
  return planner.ran_out_of_memory() || begin_offload(job) || begin_again(job, planner) ||
         begin_forgetting(planner);
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
  offloaded_.insert(signature_of(job));
  job.store = store(job.device);
  job.offloads_graphs = keeps_graphs(job);
  return true;
}

bool VirtualBatch::State::begin_turns(const Job& job) {
  return options_.micro_batch_size && job.store != nullptr && plan_.overlaps &&
         in_turn_.insert(signature_of(job)).second;
}

bool VirtualBatch::State::begin_forgetting(CheckpointPlanner& planner) const {
  const bool offloads = options_.offload.when != Offload::When::never;
  if (planner.forget || offloads || options_.checkpoint_segments) return false;
  planner.begin_forgetting();
  return true;
}

offload::Store* VirtualBatch::State::store(at::Device device) const {
  if (!store_ || store_->device() != device) store_ = make_store(options_.offload, device);
  return store_.get();
}

void VirtualBatch::State::answer_out_of_memory(const Job& job, int64_t needed, int64_t budget) {
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
    if (const Coupling* coupling = coupling_of(job)) std::rethrow_exception(coupling->why);
    throw;
  }
}

void VirtualBatch::State::check_inputs() const {
  if (!inputs_written_) return;
  throw Unsupported(
      "forward changes its inputs in place, and has to run on them again (to be measured, or "
      "because "
      "of a layer that sees the whole batch); write that out of place, as in x = x - mean. The "
      "rows "
      "that it ran on are changed");
}

const VirtualBatch::State::Coupling* VirtualBatch::State::coupling_of(const Job& job) const {
  const auto found = couplings_.find(program_kind_of(job));
  return found == couplings_.end() ? nullptr : &found->second;
}

bool VirtualBatch::State::answer_by_cuts(Job& job) {
  bool& cut = cut_[job.training];
  const Coupling* known = coupling_of(job);
  const bool uncut = known != nullptr && known->uncut;
  if (!job.cut && job.exact_coupling && !uncut && !coupled_beyond_cuts_) {
    job.cut = cut = true;
    job.offloads_graphs = false;
    if (options_.offload.when == Offload::When::always) job.store = store(job.device);
    return true;
  }
  if (!job.cut || options_.micro_batch_size || options_.static_graph) return false;
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  Coupling& coupling = couplings_[program_kind_of(job)];
  coupling.why = std::current_exception();
  coupling.uncut = true;
  job.cut = cut = false;
  return true;
}

void VirtualBatch::State::answer_coupling(const Job& job) {
  // The whole batch as one micro-batch couples nothing.
  const bool may_try = !options_.micro_batch_size && planner_.whole_batch_may_fit();
  Coupling& coupling = couplings_[program_kind_of(job)];
  if (!coupling.why) coupling.why = std::current_exception();
  if (!may_try || coupling.whole) std::rethrow_exception(coupling.why);
  coupling.whole = true;
}

bool VirtualBatch::State::answer_few_rows(const Job& job) {
  if (!planning_ || inputs_written_ || job.checkpoints != nullptr) return false;
  return few_rows_.meet(program_kind_of(job), failed_rows_, job.batch_size(),
                        std::current_exception());
}

void VirtualBatch::State::refuse_budget(const Job& job, const BudgetExceeded& why) {
  const std::string kind = program_kind_of(job);
  if (few_rows_.failing(kind) == 0) throw;
  few_rows_.refuse(kind, job.batch_size(), why);
}

VirtualBatch::VirtualBatch(Model model, Loss loss, Options options)
    : state_(std::make_unique<State>(std::move(model), std::move(loss), std::move(options))) {}
VirtualBatch::~VirtualBatch() = default;
VirtualBatch::VirtualBatch(VirtualBatch&&) noexcept = default;
VirtualBatch& VirtualBatch::operator=(VirtualBatch&&) noexcept = default;

StepReport VirtualBatch::backward(const Batch& inputs, const Batch& targets) {
  const BatchSource rows = BatchSource::from(inputs, "inputs");
  return backward(rows, targets_source(targets, rows.size));
}

StepReport VirtualBatch::backward(const BatchSource& inputs, const BatchSource& targets) {
  return state_->step(inputs, targets, /*hand_out=*/true);
}

Plan VirtualBatch::plan(const Batch& inputs, const Batch& targets) {
  const BatchSource rows = BatchSource::from(inputs, "inputs");
  return plan(rows, targets_source(targets, rows.size));
}

Plan VirtualBatch::plan(const BatchSource& inputs, const BatchSource& targets) {
  state_->step(inputs, targets, /*hand_out=*/false);
  return state_->plan();
}

}  // namespace infinitybatch
