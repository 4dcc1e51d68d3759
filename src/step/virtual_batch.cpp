#include <infinitybatch/step/virtual_batch.hpp>

#include "autograd/engine.hpp"
#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/in_step.hpp"
#include "core/out_of_memory.hpp"
#include "core/pinned_copies.hpp"
#include "core/rng.hpp"
#include "core/thread_context.hpp"
#include "core/transforms.hpp"
#include "coupled/draw_laws.hpp"
#include "memory/foreign_storage.hpp"
#include "offload/store.hpp"
#include "plan/checkpoint_planner.hpp"
#include "plan/planner.hpp"
#include "step/admission.hpp"
#include "step/kept_boundaries.hpp"
#include "step/meter.hpp"
#include "step/offload.hpp"
#include "step/options.hpp"
#include "step/virtual_batch_state.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

using Clock = std::chrono::steady_clock;

bool has_penalty(const Loss& loss) {
  const auto* separable = std::get_if<SeparableLoss>(&loss);
  return separable != nullptr && separable->has_penalty();
}

}  // namespace

VirtualBatch::State::State(Model model, Loss loss, Options options)
    : model_(std::move(model)),
      loss_(std::move(loss)),
      facts_{checked_options(std::move(options)), has_penalty(loss_)} {}

StaticTapes* VirtualBatch::State::static_tapes(const Problem& problem) {
  StaticTapes& tapes = facts_.knowledge->static_tapes[facts_.kind.lengths];
  std::vector<const void*> owned = owned_by(problem);
  if (tapes.owned != owned || *tapes.outdated) tapes = StaticTapes{{}, std::move(owned)};
  return &tapes;
}

Programs::Identity VirtualBatch::State::program_of(const Problem& problem) const {
  return Programs::identity(model_, problem.inputs->arguments);
}

Problem VirtualBatch::State::problem(const BatchSource& inputs, const BatchSource& targets) {
  Problem problem;
  problem.model = &model_;
  problem.loss = loss_;
  problem.inputs = &inputs;
  problem.targets = &targets;
  problem.exact_coupling = facts_.options.batch_coupling == BatchCoupling::exact;
  problem.match_native_rng = facts_.options.match_native_rng;
  problem.keep_outputs = facts_.options.keep_outputs;
  problem.on_micro_batch = facts_.options.on_micro_batch;
  problem.interrupt = facts_.options.interrupt;
  if (facts_.options.loss_scale) problem.loss_scale = facts_.options.loss_scale();
  if (sorted_ != nullptr) {
    problem.trimming = sorted_->trimming();
    problem.loss = sorted_->loss();
    problem.on_micro_batch = sorted_->callback(facts_.options.on_micro_batch);
  }
  admit(problem);
  if (programs_.full()) {
    programs_.clear();
    facts_.known.forget_programs();
  }
  problem.program = programs_.number(program_of(problem));
  return problem;
}

Strategy VirtualBatch::State::first_strategy(const Problem& problem) const {
  Strategy strategy;
  strategy.use_tapes(facts_.options.use_tapes, /*work=*/facts_.use_tapes);
  strategy.reuses_tapes = facts_.options.static_graph;
  const bool whole_batch_ops = facts_.cut[problem.training] || facts_.options.static_graph;
  const bool checkpoints = !facts_.options.static_graph &&
                           (facts_.options.checkpoint_segments || facts_.memory->checkpoints);
  strategy.cut(whole_batch_ops, checkpoints);
  const bool keeps = facts_.keeps_graphs(problem, strategy);
  const bool has_boundaries = strategy.is_cut() || problem.loss.coupled() != nullptr;
  const bool offloads = facts_.options.offload.when == Offload::When::always ||
                        ((strategy.is_cut() || keeps) && facts_.memory->offloads);
  if (has_boundaries && offloads) {
    strategy.offload = keeps ? Strategy::Offloads::graphs : Strategy::Offloads::boundaries;
  }
  if (strategy.cuts == Strategy::Cuts::whole_batch_ops && !strategy.offloads()) {
    strategy.kept = facts_.memory->kept;
  }
  return strategy;
}

void VirtualBatch::State::provide(Setup& setup) {
  const Strategy& strategy = setup.strategy;
  if (strategy.checkpoints() && !facts_.memory->checkpoints) facts_.memory->checkpoints.emplace();
  setup.resources.checkpoints = strategy.checkpoints() ? &*facts_.memory->checkpoints : nullptr;
  setup.resources.static_tapes = strategy.reuses_tapes ? static_tapes(setup.problem) : nullptr;
  setup.resources.store = strategy.offloads() ? store(setup.problem.device) : nullptr;
  setup.resources.renormed = &renormed_;
}

StepReport VirtualBatch::State::step(const BatchSource& inputs, const BatchSource& given,
                                     bool hand_out) {
  const InStep running;
  const Within<&ThreadContext::sees_all> inner(false);  // where a model calls this one
  const BatchSource targets = targets_for(loss_, given, inputs.size);
  if (facts_.options.trim.empty()) return run_step(inputs, targets, hand_out);
  refuse_transforms();
  const bool reads_parts = facts_.options.micro_batch_size.has_value();
  const SortedStep sorted(facts_.options, loss_, inputs, targets, reads_parts, sequences_);
  struct AtWork {
    explicit AtWork(const SortedStep*& place, const SortedStep& here) : place(place) {
      place = &here;
    }
    ~AtWork() { place = nullptr; }
    const SortedStep*& place;
  } const at_work(sorted_, sorted);
  StepReport report = run_step(sorted.inputs(), sorted.targets(), hand_out);
  if (report.outputs) report.outputs = sorted.trimming()->unsorted(*report.outputs);
  return report;
}

StepReport VirtualBatch::State::run_step(const BatchSource& inputs, const BatchSource& targets,
                                         bool hand_out) {
  const Clock::time_point start = Clock::now();
  autograd::forget_failed_pass();
  const PinnedCopies copies;
  const PlainNumbers::Scope remembering(&numbers_);
  Setup setup;
  setup.problem = problem(inputs, targets);
  facts_.kind = batch_kind(setup.problem, inputs, targets);
  facts_.knowledge = &facts_.known.of(facts_.kind);
  facts_.memory = &facts_.known.memory_of(facts_.kind);
  setup.strategy = first_strategy(setup.problem);
  provide(setup);
  const memory::ForeignStorages counted(reachable_tensors(setup.problem));
  const memory::PeakScope peak(setup.problem.device);
  std::optional<int64_t> budget;
  if (facts_.options.memory_budget)
    budget = facts_.options.memory_budget->resolve(setup.problem.device);
  if (const int64_t live = memory::live(setup.problem.device); budget && live > *budget) {
    throw BudgetExceeded(
        live, *budget, std::nullopt,
        setup.problem.device.is_cpu()
            ? "What is allocated before the step (parameters, gradients, optimizer state, inputs)"
            : "What is allocated before the step (parameters, gradients, optimizer state, inputs, "
              "workspaces of the device's libraries)",
        live + gradient_bytes(setup.problem.parameters, setup.problem.device));
  }

  Findings findings = facts_.knowledge->findings;  // kept where the step succeeds
  setup.resources.findings = &findings;
  answers_.begin_step();
  facts_.beside_plan = false;
  const FewRows::Step few_rows(facts_.knowledge->few_rows);
  const CollectivesSince said;
  for (int64_t restarts = 0;; ++restarts) {
    said.refuse_retry();
    // The CPU's limit is enforced; an accelerator's is kept by the plan, and looked at after each
    // instruction. One for each attempt, so that it tells what failed in this one.
    std::optional<memory::Limit> limit;
    if (budget) limit.emplace(*budget, setup.problem.device);
    try {
      facts_.attempt = {};
      // What passed the budget in rehearsals says nothing of the step.
      if (budget && ways_.choose_boundaries(setup, *budget)) {
        limit.emplace(*budget, setup.problem.device);
      }
      StepReport report = attempt(setup, budget, hand_out);
      // What was looked for there is not as deep as settings that count with static_graph.
      if (facts_.attempt.state_as_before && !facts_.options.static_graph) {
        programs_.left_as_it_was();
      } else {
        programs_.left(program_of(setup.problem).configuration);
      }
      facts_.knowledge->findings = std::move(findings);
      if (setup.strategy.reuses_tapes) setup.resources.static_tapes->end_step();
      report.peak_bytes = peak.peak();
      // Of the plan alone, which says nothing of a rehearsal, a look at rows or an attempt that
      // took more.
      const auto& predicted = report.predicted_peak_bytes;
      const bool beside = facts_.beside_plan || restarts > 0;
      if (beside && report.peak_bytes > predicted && own_peak_ <= predicted) {
        report.predicted_peak_bytes.reset();
      }
      if (setup.strategy.offloads()) tell_offload(setup, report);
      report.memory_budget = budget;
      report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      report.restarts = restarts;
      return report;
    } catch (...) {
      if (!answers_.answer(setup, budget, limit ? &*limit : nullptr)) --restarts;
      provide(setup);
    }
  }
}

StepReport VirtualBatch::State::attempt(const Setup& setup, const std::optional<int64_t>& budget,
                                        bool hand_out) {
  facts_.attempt = {};
  const RngSnapshot random = RngSnapshot::capture(devices_of(setup.problem));
  Setup checked;
  std::optional<Executor> executor;
  try {
    StepReport report;
    if (setup.problem.trimming) {
      setup.problem.trimming->at_least = 0;  // of an attempt that failed
      learn_trimming(setup);
    }
    checked = setup;
    const bool rehearsed = (setup.problem.loss.coupled() != nullptr || setup.strategy.is_cut()) &&
                           !setup.strategy.checkpoints();
    if (rehearsed && !facts_.options.micro_batch_size) {
      ways_.choose_offload(checked.strategy);
      ways_.rehearse(checked, *budget);
      ways_.choose_graphs(setup, *budget);
      ways_.choose_offload(checked.strategy);
      random.restore();
    }
    if (setup.strategy.offloads()) offloaded_before_ = setup.resources.store->statistics();
    const memory::PeakScope own(setup.problem.device);
    executor.emplace(checked);
    if (!facts_.options.micro_batch_size) executor->look_for_few_rows();
    if (setup.strategy.checkpoints()) {
      ways_.follow_checkpoints(*executor, setup, budget, hand_out, report);
    } else if (facts_.options.micro_batch_size) {
      ways_.follow_fixed_size(*executor, setup, hand_out, report);
    } else {
      ways_.follow_planner(*executor, checked, *budget, hand_out, report);
    }
    if (setup.strategy.offloads()) {
      times_ = executor->times();
      graph_bytes_ = executor->graph_bytes();
    }
    if (!hand_out) {
      facts_.attempt.inputs_written = executor->forwards().wrote_inputs();
      executor->roll_back();
      random.restore();
      facts_.check_inputs();
    }
    facts_.attempt.state_as_before = executor->forwards().state().found_no_change();
    const std::optional<int64_t> without_look = executor->checks().peak_without_look();
    if (without_look) facts_.beside_plan = true;
    own_peak_ = without_look.value_or(own.peak());
    report.loss = executor->loss();
    report.outputs = executor->take_outputs();
    report.strategy = facts_.plan.strategy;
    report.strategy_reason = why_recomputed_or_offloaded(facts_.plan, *facts_.memory);
    if (const auto opaque = executor->opaque()) {
      report.strategy = "rerun";
      report.strategy_reason = facts_.options.use_tapes ? *opaque : "use_tapes=false was given";
    }
    return report;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    facts_.attempt.failed_in_loss = executor && executor->in_whole_loss();
    if (executor) {
      facts_.attempt.coupled_beyond_cuts = executor->coupled_beyond_cuts();
      facts_.attempt.failed_rows = executor->failed_rows();
      facts_.attempt.inputs_written =
          facts_.attempt.inputs_written || executor->forwards().wrote_inputs();
      executor->roll_back();
    }
    // Nobody has looked at recordings of a step that failed: what mixes samples is looked for in
    // recordings alone, and would not be met again.
    if (setup.strategy.reuses_tapes) setup.resources.static_tapes->forget();
    random.restore();
    throw;
  }
}

void VirtualBatch::State::tell_offload(const Setup& setup, StepReport& report) {
  const offload::StoreStatistics& before = offloaded_before_;
  const offload::StoreStatistics now = setup.resources.store->statistics();
  const OffloadedMeanwhile offloaded(before, now);
  report.offloaded_bytes = offloaded.bytes;
  report.offload_seconds = offloaded.seconds;
  facts_.plan.offloads = true;
  facts_.plan.offloaded_bytes = report.offloaded_bytes;
  facts_.plan.offload_seconds = report.offload_seconds;
  facts_.plan.graph_bytes = graph_bytes_;
  if (!setup.problem.device.is_cpu()) return;
  times_.set_link(report.offloaded_bytes, now.seconds_out - before.seconds_out,
                  now.moved_back - before.moved_back, now.seconds_back - before.seconds_back);
  facts_.plan.predicted_offload_seconds = simulate_copies(facts_.plan, times_);
  // Copies so short that the store makes them itself: no thread wakes up as fast.
  if (report.offload_seconds.hidden <= 0) {
    CopySeconds& next = *facts_.plan.predicted_offload_seconds;
    next = {0, next.hidden + next.waited};
  }
}

offload::Store* VirtualBatch::State::store(at::Device device) {
  if (!store_ || store_->device() != device) store_ = make_store(facts_.options.offload, device);
  return store_.get();
}

VirtualBatch::VirtualBatch(Model model, Loss loss, Options options)
    : state_(std::make_unique<State>(std::move(model), std::move(loss), std::move(options))) {}
VirtualBatch::~VirtualBatch() = default;
VirtualBatch::VirtualBatch(VirtualBatch&&) noexcept = default;
VirtualBatch& VirtualBatch::operator=(VirtualBatch&&) noexcept = default;

StepReport VirtualBatch::backward(const Batch& inputs, const Batch& targets) {
  const Sources sources = sources_of(inputs, targets, state_->batch_dim(), state_->loss());
  return state_->step(sources.inputs, sources.targets, /*hand_out=*/true);
}

StepReport VirtualBatch::backward(const BatchSource& inputs, const BatchSource& targets) {
  refuse_batch_dim(state_->batch_dim());
  return state_->step(inputs, targets, /*hand_out=*/true);
}

Plan VirtualBatch::plan(const Batch& inputs, const Batch& targets) {
  const Sources sources = sources_of(inputs, targets, state_->batch_dim(), state_->loss());
  state_->step(sources.inputs, sources.targets, /*hand_out=*/false);
  return state_->plan();
}

Plan VirtualBatch::plan(const BatchSource& inputs, const BatchSource& targets) {
  refuse_batch_dim(state_->batch_dim());
  state_->step(inputs, targets, /*hand_out=*/false);
  return state_->plan();
}

}  // namespace infinitybatch
