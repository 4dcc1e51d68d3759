#include "step/ways.hpp"

#include "core/out_of_memory.hpp"
#include "execute/schedule.hpp"
#include "step/admission.hpp"
#include "step/boundary_choice.hpp"
#include "step/kept_boundaries.hpp"
#include "step/meter.hpp"
#include "step/options.hpp"
#include "step/rehearsal.hpp"
#include "step/sorted_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <limits>
#include <utility>

namespace infinitybatch {
namespace {

/// A rehearsal leaves out the last instruction.
Piece prepare(Piece piece, bool hand_out) {
  auto& instructions = piece.plan.instructions;
  if (!hand_out && instructions.back().operation == Operation::hand_out) instructions.pop_back();
  return piece;
}

}  // namespace

std::vector<int64_t> Ways::fixed_sizes(const Setup& setup, int64_t rows, bool for_cuts) const {
  if (setup.problem.trimming && facts_.options.micro_batch_size)
    return setup.problem.trimming->sizes;
  return (for_cuts ? split_for_cuts : split_by)(setup.problem.batch_size(), rows);
}

void Ways::follow_fixed_size(Executor& executor, const Setup& setup, bool hand_out,
                             StepReport& report) {
  std::vector<int64_t> sizes =
      fixed_sizes(setup, *facts_.options.micro_batch_size, setup.strategy.is_cut());
  if (setup.strategy.is_cut()) {
    follow_cuts(executor, setup, std::move(sizes), hand_out);
    report.micro_batch_sizes = facts_.plan.micro_batch_sizes;
    return;
  }
  if (setup.problem.loss.coupled() != nullptr) {
    const int64_t count = static_cast<int64_t>(sizes.size());
    facts_.plan =
        two_pass_plan(std::move(sizes), std::min(facts_.options.retained_micro_batches, count),
                      setup.strategy.offloads_graphs());
    if (setup.strategy.offloads())
      facts_.plan = with_offload(std::move(facts_.plan), may_overlap(setup));
  } else {
    facts_.plan = stream_plan(std::move(sizes), facts_.penalty);
  }
  facts_.plan.baseline_bytes = memory::live(setup.problem.device);
  facts_.plan.reason = given_size(facts_.options) + " was given";
  Piece piece;
  piece.plan = facts_.plan;
  piece.settled = true;
  run(executor, prepare(std::move(piece), hand_out), 0, setup.problem.device);
  report.micro_batch_sizes = facts_.plan.micro_batch_sizes;
}

void Ways::learn_boundaries(const Executor& executor, const Setup& setup, Rows rows) {
  if (facts_.memory->boundaries || setup.strategy.cuts != Strategy::Cuts::whole_batch_ops) return;
  facts_.memory->boundaries.emplace(executor.recorded(rows), rows.size(),
                                    setup.problem.loss.coupled() != nullptr);
}

void Ways::follow_cuts(Executor& executor, const Setup& setup, std::vector<int64_t> sizes,
                       bool hand_out) {
  const auto count = static_cast<int64_t>(sizes.size());
  const int64_t retained = std::min(facts_.options.retained_micro_batches, count);
  const auto plan = [&](int64_t segments) {
    Plan cut = cut_plan(sizes, segments, retained, setup.problem.loss.coupled() != nullptr,
                        facts_.penalty, setup.strategy.kept);
    return setup.strategy.offloads() ? with_offload(std::move(cut), may_overlap(setup)) : cut;
  };
  Piece piece;
  piece.settled = true;
  piece.plan = plan(/*segments=*/1);
  piece.plan.instructions.resize(sizes.size());  // the recordings
  facts_.plan = piece.plan;
  run(executor, piece, 0, setup.problem.device);
  learn_boundaries(executor, setup, {0, sizes.front()});
  piece.plan = plan(executor.segments());
  facts_.plan = piece.plan;
  facts_.plan.baseline_bytes = memory::live(setup.problem.device);
  auto& instructions = piece.plan.instructions;
  instructions.erase(instructions.begin(), instructions.begin() + count);
  run(executor, prepare(std::move(piece), hand_out), 0, setup.problem.device);
  setup.resources.findings->recordings_checked = true;
}

void Ways::follow_checkpoints(Executor& executor, const Setup& setup,
                              const std::optional<int64_t>& budget, bool hand_out,
                              StepReport& report) {
  CheckpointPlanner& planner = *facts_.memory->checkpoints;
  const int64_t baseline = memory::live(setup.problem.device);
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 4;
  const int64_t rows = facts_.options.micro_batch_size.value_or(1);
  std::vector<int64_t> sizes =
      fixed_sizes(setup, rows, /*for_cuts=*/!setup.strategy.per_micro_batch());
  if (setup.problem.trimming) setup.problem.trimming->sizes = sizes;
  CheckpointPlanner::Situation situation;
  situation.available = budget ? *budget - baseline : kUnlimited;
  situation.offloaded = setup.strategy.offloads();
  situation.micro_batches = static_cast<int64_t>(sizes.size());
  const bool coupled = setup.problem.loss.coupled() != nullptr;
  situation.coupled = coupled;
  situation.together = !setup.strategy.per_micro_batch();
  situation.fixed = facts_.options.checkpoint_segments;
  planner.begin(situation);
  int64_t row = 0;
  int64_t most = baseline;
  const auto follow = [&](Plan plan, size_t from, size_t to, bool counts = true) {
    Piece piece;
    piece.settled = true;
    const auto begin = plan.instructions.begin();
    plan.instructions = {begin + static_cast<int64_t>(from), begin + static_cast<int64_t>(to)};
    piece.plan = std::move(plan);
    const memory::PeakScope peak(setup.problem.device);
    run(executor, piece, row, setup.problem.device);
    if (counts) most = std::max(most, peak.peak());
  };
  // Nobody goes back before all have been forward.
  const bool together = coupled || situation.together;
  const auto offloaded = [&](Plan plan) {
    return setup.strategy.offloads() ? with_offload(std::move(plan), planner.overlaps()) : plan;
  };
  std::vector<int64_t> segments;
  std::vector<Stretches> stretches;
  for (const int64_t size : sizes) {
    follow(checkpoint_plan({size}, {0}, coupled, /*penalty=*/false), 0, 1);
    segments.push_back(executor.segments(Rows{row, row + size}));
    stretches.push_back(executor.stretches(Rows{row, row + size}));
    const bool last = segments.size() == sizes.size();
    const Plan rest =
        offloaded(checkpoint_plan({size}, {segments.back()}, coupled, last && facts_.penalty));
    const size_t end = rest.instructions.size() - 1;
    if (!together) follow(rest, 1, end);
    if (!together && last && hand_out) follow(rest, end, end + 1, /*counts=*/false);
    row += size;
  }
  facts_.plan =
      offloaded(setup.strategy.per_micro_batch()
                    ? checkpoint_plan(sizes, segments, coupled, facts_.penalty)
                    : cut_plan(sizes, stretches, /*retained=*/0, coupled, facts_.penalty));
  if (together) {
    row = 0;
    const auto& instructions = facts_.plan.instructions;
    const size_t end = instructions.size() - 1;
    const auto whole = std::find_if(
        instructions.begin(), instructions.end(),
        [](const Instruction& each) { return each.operation == Operation::whole_loss; });
    const auto loss = static_cast<size_t>(whole - instructions.begin());
    follow(facts_.plan, sizes.size(), std::min(loss, end));
    // What the loss itself takes is not the cuts' to answer.
    if (coupled) follow(facts_.plan, loss, loss + 1, /*counts=*/false);
    if (coupled) follow(facts_.plan, loss + 1, end);
    // Looks at other rows are no part of what a plan needs.
    if (hand_out) follow(facts_.plan, end, end + 1, /*counts=*/false);
  }
  if (!setup.strategy.per_micro_batch()) setup.resources.findings->recordings_checked = true;
  facts_.plan.baseline_bytes = baseline;
  facts_.plan.budget_bytes = budget;
  if (!coupled) facts_.plan.predicted_peak_bytes = baseline + planner.estimate();
  planner.measured(most - baseline);
  facts_.plan.reason =
      facts_.options.checkpoint_segments
          ? "checkpoint_segments=" + std::to_string(*facts_.options.checkpoint_segments) +
                " was given"
          : "the graph of a single sample does not fit";
  report.predicted_peak_bytes = facts_.plan.predicted_peak_bytes;
  report.micro_batch_sizes = std::move(sizes);
}

bool Ways::may_overlap(const Setup& setup) const {
  // Of a fixed size nothing is predicted: what was too much is known where the limit is enforced.
  const bool known = !facts_.options.memory_budget || setup.problem.device.is_cpu();
  return known && !facts_.memory->in_turn;
}

Request Ways::request(const Setup& setup, int64_t budget) const {
  Request request;
  request.signature = facts_.kind.layout;
  if (setup.strategy.is_cut()) request.signature += "|cut into " + std::to_string(facts_.segments);
  request.offloaded = setup.strategy.offloads();
  if (request.offloaded) request.signature += "|offloaded";
  request.offloads_graphs = setup.strategy.offloads_graphs();
  if (request.offloads_graphs) request.signature += "|graphs, too";
  request.batch_size = setup.problem.batch_size();
  if (setup.strategy.cuts == Strategy::Cuts::whole_batch_ops) {
    plan_with(request, setup.strategy.kept, facts_.memory->boundaries);
  }
  if (const CoupledLoss* const loss = setup.problem.loss.coupled(); loss != nullptr) {
    request.outputs_elsewhere =
        loss->device().value_or(setup.problem.device) != setup.problem.device;
    request.outputs_offload = request.offloaded && !request.outputs_elsewhere;
  }
  request.dims = lengths_of(*setup.problem.inputs, *setup.problem.targets);
  if (setup.problem.trimming) plan_by_length(request, *setup.problem.trimming);
  request.baseline_bytes = memory::live(setup.problem.device);
  request.budget_bytes = budget;
  request.gradient_bytes = gradient_bytes(setup.problem.parameters, setup.problem.device);
  request.penalty = facts_.penalty;
  request.two_pass = setup.problem.loss.coupled() != nullptr || setup.strategy.is_cut();
  request.measured = !setup.problem.device.is_cpu();
  request.whole_loss = setup.problem.loss.coupled() != nullptr;
  request.segments = setup.strategy.is_cut() ? facts_.segments : 0;
  facts_.knowledge->limit(request);
  return request;
}

void Ways::rehearse(const Setup& setup, int64_t budget) {
  if (facts_.planner.settled_for(request(setup, budget))) return;
  const auto check = [&](const Executor& executor, Rows first, const Measurement& measured) {
    learn_boundaries(executor, setup, first);
    if (facts_.memory->boundaries) facts_.memory->boundaries->learn(measured.advances);
    facts_.attempt.inputs_written = executor.forwards().wrote_inputs();
    facts_.check_inputs();
  };
  Rehearsal rehearsal{facts_.planner, facts_.graph_choices, setup,
                      [&] { return request(setup, budget); }, check};
  rehearsal.setup.problem.on_micro_batch = nullptr;
  rehearsal.setup.problem.keep_outputs = false;
  const auto note = [&] {
    facts_.attempt.planning = facts_.attempt.planning || rehearsal.began;
    facts_.beside_plan = facts_.beside_plan || rehearsal.began;
  };
  try {
    rehearsal.run();
    note();
  } catch (...) {
    note();
    facts_.attempt.coupled_beyond_cuts = rehearsal.coupled_beyond_cuts;
    facts_.attempt.failed_rows = rehearsal.failed_rows;
    throw;
  }
}

bool Ways::offloads_graphs() const {
  return !facts_.graph_choices.empty() && facts_.graph_choices.offloads(facts_.kind.shapes());
}

void Ways::choose_offload(Strategy& strategy) const {
  if (!strategy.offloads()) return;
  strategy.offload =
      offloads_graphs() ? Strategy::Offloads::graphs : Strategy::Offloads::boundaries;
}

void Ways::choose_graphs(const Setup& setup, int64_t budget) {
  const bool possible = setup.problem.loss.coupled() != nullptr && !setup.strategy.is_cut() &&
                        setup.strategy.offloads();
  if (!possible || !facts_.planner.settled() || facts_.planner.nothing_fits()) return;
  const std::string kind = facts_.kind.shapes();
  if (facts_.graph_choices.find(kind) != nullptr) return;
  Setup offload = setup;
  offload.strategy.offload = Strategy::Offloads::graphs;
  facts_.graph_choices.choose(
      kind, facts_.planner, *setup.resources.store, facts_.planner.plan(), request(setup, budget),
      {[&] { return request(offload, budget); }, [&] { rehearse(offload, budget); }});
}

bool Ways::choose_boundaries(Setup& setup, int64_t budget) {
  const auto with = [&setup](const Strategy& strategy) {
    Setup other = setup;
    other.strategy = strategy;
    if (!strategy.offloads()) other.resources.store = nullptr;
    return other;
  };
  BoundaryChoice choice{
      facts_.planner,
      *facts_.memory,
      facts_.options,
      setup.problem.batch_size(),
      budget,
      [&](const Strategy& strategy) { return request(with(strategy), budget); },
      [&](const Strategy& strategy) { rehearse(with(strategy), budget); },
  };
  const bool rehearsed = choice.choose(setup.strategy);
  if (!setup.strategy.offloads()) setup.resources.store = nullptr;
  return rehearsed;
}

void Ways::follow_planner(Executor& executor, const Setup& setup, int64_t budget, bool hand_out,
                          StepReport& report) {
  facts_.planner.begin(request(setup, budget));
  facts_.attempt.planning = true;
  if (setup.problem.loss.coupled() != nullptr || setup.strategy.is_cut()) {
    const Piece piece = prepare(facts_.planner.two_pass(), hand_out);
    report.micro_batch_sizes = piece.plan.micro_batch_sizes;
    report.predicted_peak_bytes = piece.plan.predicted_peak_bytes;
    if (setup.problem.trimming) setup.problem.trimming->sizes = report.micro_batch_sizes;
    facts_.plan = piece.plan;
    facts_.planner.observe(piece, run_planned(executor, piece, 0, setup.problem.device));
    if (setup.strategy.is_cut()) setup.resources.findings->recordings_checked = true;
    facts_.plan = facts_.planner.plan();
    if (!facts_.memory->what_compared.empty())
      facts_.plan.reason += "; " + facts_.memory->what_compared;
    if (!facts_.graph_choices.empty()) {
      const GraphChoice* choice = facts_.graph_choices.find(facts_.kind.shapes());
      if (choice != nullptr) facts_.plan.reason += "; " + choice->reason;
    }
    return;
  }
  while (std::optional<Piece> piece = facts_.planner.next()) {
    const std::vector<int64_t>& sizes = piece->plan.micro_batch_sizes;
    report.micro_batch_sizes.insert(report.micro_batch_sizes.end(), sizes.begin(), sizes.end());
    // Set where one settled plan is the whole step, be it for the first time at this baseline.
    report.predicted_peak_bytes = piece->plan.predicted_peak_bytes;
    *piece = prepare(std::move(*piece), hand_out);
    if (setup.problem.trimming) setup.problem.trimming->at_least = piece->least_length;
    facts_.planner.observe(*piece, run(executor, *piece, piece->first_row, setup.problem.device));
    executor.checks().examine();
  }
  if (setup.problem.trimming) setup.problem.trimming->at_least = 0;
  facts_.plan = facts_.planner.plan();
}

}  // namespace infinitybatch
