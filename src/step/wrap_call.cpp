#include "step/wrap_call.hpp"

#include "autograd/engine.hpp"
#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"
#include "execute/external_loss.hpp"
#include "step/admission.hpp"
#include "step/boundary_choice.hpp"
#include "step/kept_boundaries.hpp"
#include "step/meter.hpp"
#include "step/sorted_batch.hpp"
#include "step/waiting_calls.hpp"
#include "step/wrap_rehearsal.hpp"
#include "step/wrap_report.hpp"
#include "step/wrap_request.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {

ForwardCall::ForwardCall(const std::shared_ptr<Wrapped>& wrapped, Setup setup, const Batch& inputs)
    : wrapped_(wrapped),
      options_(wrapped->options),
      inputs_(inputs),
      rows_(BatchSource::from(detached(inputs), "inputs")),
      targets_(no_targets(Batch(), rows_.size)),
      setup_(std::move(setup)),
      with_gradients_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()),
      rerunnable_(inputs) {
  if (options_.memory_budget) {
    planning_.emplace(*wrapped);
    if (!planning_->allowed()) {
      throw StateError(
          "this wrapped model is running already, in another thread or around this call; with a "
          "memory_budget one thread at a time may call it");
    }
    high_water_.emplace(setup_.problem.device);
    counted_ = std::make_unique<memory::ForeignStorages>(reachable_tensors(setup_.problem));
    budget_ = options_.memory_budget->resolve(setup_.problem.device);
  }
  setup_.problem.inputs = &rows_;
  setup_.problem.targets = &targets_;
  setup_.problem.loss = no_loss();
  setup_.problem.exact_coupling = options_.batch_coupling == BatchCoupling::exact;
  setup_.strategy.use_tapes(options_.use_tapes, /*work=*/wrapped_->use_tapes);
  setup_.problem.interrupt = options_.interrupt;
  setup_.problem.reentrant = true;
  setup_.problem.goes_back_again = true;  // the caller may run backward again
  kind_ = batch_kind(setup_.problem, rows_, targets_);
  findings_ = wrapped_->findings_of(kind_);
  setup_.resources.findings = &findings_;
  const bool cut = wrapped_->sees_whole_batch() || options_.static_graph;
  if (cut && options_.micro_batch_size.value_or(0) < rows_.size) {
    setup_.strategy.cuts = Strategy::Cuts::whole_batch_ops;
  }
  if (!budget_) return;
  for (const auto& call : WaitingCalls::all()) {
    if (call->wrapped == wrapped_ && !call->differentiated) ++planner_;
  }
  planner_ = std::min(planner_, Wrapped::kCalls - 1);
}

int64_t ForwardCall::live_with_gradients() const {
  const Problem& problem = setup_.problem;
  const int64_t live = memory::live(problem.device);
  return live + (with_gradients_ ? gradient_bytes(problem.parameters, problem.device) : 0);
}

Request ForwardCall::request() const {
  return request_of(*wrapped_, setup_, inputs_, kind_, *budget_, with_gradients_);
}

Batch ForwardCall::run() {
  try {
    if (budget_ && with_gradients_) hear_of_room(*wrapped_, planner_);
    return run_attempts();
  } catch (const BudgetExceeded& refusal) {
    if (with_gradients_) ask_for_room(refusal, setup_.problem.device);
    throw;
  }
}

Batch ForwardCall::run_attempts() {
  struct Forget {  // it may hold tensors, and whoever called this
    explicit Forget(ForwardCall& call) : call(call) { forget(); }
    ~Forget() { forget(); }
    void forget() const {
      if (call.budget_) call.forget_error_of_few_rows();
    }
    ForwardCall& call;
  } const forget(*this);
  const CollectivesSince said;
  for (;; ++restarts_) {
    said.refuse_retry();
    rerunnable_.check();
    const at::Device device = setup_.problem.device;
    const int64_t live = memory::live(device);
    if (budget_ && live > *budget_ && !drop_graphs(*wrapped_, device, before_) &&
        !drop_boundaries(*wrapped_, device, before_)) {
      throw BudgetExceeded(live, *budget_, std::nullopt,
                           "What is allocated before forward (parameters, gradients, optimizer "
                           "state, inputs, what other calls keep for their backward)",
                           live_with_gradients());
    }
    std::optional<memory::Limit> limit;
    if (budget_) limit.emplace(*budget_, setup_.problem.device);
    planned_ = false;
    finishing_ = false;
    failed_rows_ = 0;
    try {
      return attempt(limit);
    } catch (...) {
      const Failed::Scope failed(failed_, std::current_exception());
      if (!answer(limit ? &*limit : nullptr)) --restarts_;
    }
  }
}

/// Where what waits at the cuts goes, or graphs that are kept; none where it stays on the device.
void ForwardCall::choose_store() {
  const bool always = options_.offload.when == Offload::When::always;
  const bool fixed = options_.micro_batch_size.has_value();
  const bool keeps = with_gradients_ && (options_.retained_micro_batches > 0 || !fixed);
  bool offloads = always && (setup_.strategy.is_cut() || keeps);
  if (!offloads && (setup_.strategy.is_cut() || (keeps && fixed))) {
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    offloads = wrapped_->known.memory_of(kind_).offloads;
  }
  store_ = offloads ? wrapped_->store_on(setup_.problem.device) : nullptr;
  setup_.resources.store = store_.get();
  const bool graphs = !setup_.strategy.is_cut() &&
                      (fixed || wrapped_->graph_choices[planner_].offloads(kind_.shapes()));
  setup_.strategy.offload = !offloads ? Strategy::Offloads::nothing
                            : graphs  ? Strategy::Offloads::graphs
                                      : Strategy::Offloads::boundaries;
  setup_.strategy.kept.reset();
  if (!setup_.strategy.is_cut() || offloads) return;
  if (!with_gradients_) {
    setup_.strategy.kept = std::vector<int64_t>();  // nobody goes back
  } else if (budget_) {
    setup_.strategy.kept = memory().kept;
  }
}

bool ForwardCall::choose_boundaries() {
  if (!with_gradients_) return false;
  const auto adopt = [this](const Strategy& strategy) {
    setup_.strategy = strategy;
    setup_.resources.store = strategy.offloads() ? store_.get() : nullptr;
  };
  Strategy chosen = setup_.strategy;
  BoundaryChoice choice{planner(),
                        memory(),
                        options_,
                        rows_.size,
                        *budget_,
                        [&](const Strategy& strategy) {
                          adopt(strategy);
                          return request();
                        },
                        [&](const Strategy& strategy) {
                          adopt(strategy);
                          rehearse();
                        }};
  const bool rehearsed = choice.choose(chosen);
  adopt(chosen);
  return rehearsed;
}

/// Under a plan, once it is known what the loss needs: whether graphs are offloaded, or run again
/// as far as they do not fit.
void ForwardCall::choose_graphs() {
  if (!may_offload_graphs() || !planner().settled() || planner().nothing_fits()) return;
  GraphChoices& choices = wrapped_->graph_choices[planner_];
  const std::string kind = kind_.shapes();
  if (choices.find(kind) != nullptr) return;
  const Request again = request();
  planner().begin(again);
  const Plan plan = planner().two_pass().plan;
  if (!planner().foresees_whole_loss(plan)) return;
  const auto offloaded = [&] {
    setup_.strategy.offload = Strategy::Offloads::graphs;
    return request();
  };
  const auto rehearse_offloaded = [&] {
    setup_.strategy.offload = Strategy::Offloads::graphs;
    rehearse();
  };
  choices.choose(kind, planner(), *store_, plan, again, {offloaded, rehearse_offloaded});
  setup_.strategy.offload =
      choices.offloads(kind) ? Strategy::Offloads::graphs : Strategy::Offloads::boundaries;
}

void ForwardCall::rehearse() {
  WrapRehearsal rehearsal{
      *wrapped_,      setup_, inputs_, rows_, kind_, planner(), wrapped_->graph_choices[planner_],
      with_gradients_};
  rehearsal.request = [this] { return request(); };
  rehearsal.check_inputs = [this] { rerunnable_.check(); };
  rehearsal.learn = [this](const Executor& executor, Rows rows, const Measurement& measured) {
    if (!setup_.strategy.is_cut()) return;
    auto& boundaries = memory().boundaries;
    if (!boundaries) boundaries.emplace(executor.recorded(rows), rows.size(), /*coupled=*/true);
    boundaries->learn(measured.advances);
  };
  const auto note = [&] {
    planned_ = planned_ || rehearsal.began;
    rehearsed_ = rehearsed_ || rehearsal.began;
  };
  try {
    rehearsal.run();
    note();
  } catch (...) {
    note();
    failed_rows_ = rehearsal.failed_rows;
    throw;
  }
}

/// The plan for what is live now.
Split ForwardCall::choose() {
  const Request wanted = request();
  planner().begin(wanted);
  planned_ = true;
  piece_ = with_gradients_ ? plan_beside_loss(planner(), wanted) : planner().two_pass();
  return split();
}

Batch ForwardCall::attempt(std::optional<memory::Limit>& limit) {
  rerunnable_.check();  // since an earlier attempt
  if (setup_.problem.trimming) {
    setup_.problem.trimming->at_least = 0;
    learn_trimming(setup_);
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    Findings& known = wrapped_->known.of(kind_).findings;
    known.trimmed_outputs = findings_.trimmed_outputs;
    known.trimmed_steps = findings_.trimmed_steps;
  }
  choose_store();
  const StoreUse alone(*wrapped_, store_.get());
  const bool rehearsed = with_gradients_ || setup_.strategy.is_cut();
  if (rehearsed && !options_.micro_batch_size) {
    rehearse();
    // What passed the budget in rehearsals says nothing of the call.
    if (choose_boundaries()) limit.emplace(*budget_, setup_.problem.device);
    choose_graphs();
    rerunnable_.check();
  }
  // From here on: what a rehearsal needs is no part of the plan.
  std::unique_ptr<memory::HighWater> high_water;
  if (budget_) high_water = std::make_unique<memory::HighWater>(setup_.problem.device);
  ForwardPass pass(wrapped_, setup_, inputs_, kind_);
  if (high_water) pass.measured_by(*high_water);
  const std::shared_ptr<WrappedCall> call = pass.call();
  call->budget = budget_;
  try {
    Batch outputs;
    if (options_.micro_batch_size) {
      piece_ = Piece();
      outputs = pass.run(given_split(setup_, options_, rows_.size));
    } else if (setup_.strategy.is_cut() || with_gradients_) {
      outputs = pass.run(choose());
    } else {
      outputs = without_gradients(pass);
    }
    memory::Limit::check();
    if (setup_.strategy.is_cut()) wrapped_->sees_whole_batch() = true;
    call->report = report_of(*call, pass.sizes());
    if (budget_) {
      const GraphChoice* graphs =
          may_offload_graphs() ? wrapped_->graph_choices[planner_].find(kind_.shapes()) : nullptr;
      const bool cut = call->report->strategy == "cut" && with_gradients_;
      if (cut) {
        call->report->strategy_reason = why_recomputed_or_offloaded(call->run->plan(), memory());
      } else if (graphs != nullptr && call->report->strategy_reason.empty()) {
        call->report->strategy_reason = graphs->reason;
      }
      call->report->memory_budget = budget_;
      report_peak(*call->report, piece_.plan,
                  {high_water_->peak(), high_water->peak(), pass.looked() || rehearsed_});
      call->report->restarts = restarts_;
      call->high_water = std::move(high_water);
      call->counted = std::move(counted_);
    }
    publish(*wrapped_, call->report);
    call->run->end_forward();
    if (budget_ && with_gradients_) {
      call->piece = piece_;
      call->planner = planner_;
      call->begun = ++wrapped_->begun[planner_];
      WaitingCalls::add(call);
    }
    return outputs;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    finishing_ = pass.finishing();
    failed_rows_ = pass.failed_rows();
    saw_coupling_ = pass.saw_coupling();
    pass.roll_back();
    throw;
  }
}

/// Nothing waits for a backward: the micro-batches that are measured are the real ones.
Batch ForwardCall::without_gradients(ForwardPass& pass) {
  planner().begin(request());
  planned_ = true;
  Trimming* const trimming = setup_.problem.trimming.get();
  while (const std::optional<Piece> piece = planner().next()) {
    piece_ = *piece;
    if (piece->settled) return pass.run({piece->plan.micro_batch_sizes});
    const Perform perform = [&](const Instruction& instruction, Rows rows) {
      const Operation operation = instruction.operation;
      if (operation != Operation::forward) return;
      if (rows.size() > 1 && pass.wants_another_size()) {
        pass.run({rows.begin, rows.end - 1});
        rows.begin = rows.end - 1;
      }
      pass.run(rows);
    };
    if (trimming != nullptr) trimming->at_least = piece->least_length;
    planner().observe(*piece, infinitybatch::run(perform, nullptr, *piece, piece->first_row,
                                                 setup_.problem.device));
    if (trimming != nullptr) trimming->at_least = 0;
  }
  return pass.finish();
}

Batch forward(const std::shared_ptr<Wrapped>& wrapped, Setup setup, const Batch& inputs) {
  autograd::forget_failed_pass();
  return ForwardCall(wrapped, std::move(setup), inputs).run();
}

}  // namespace infinitybatch
