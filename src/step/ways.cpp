// The ways that a step can go: a fixed size, a plan, from cut to cut, segment by segment.
#include "core/out_of_memory.hpp"
#include "execute/schedule.hpp"
#include "step/admission.hpp"
#include "step/meter.hpp"
#include "step/options.hpp"
#include "step/rehearsal.hpp"
#include "step/virtual_batch_state.hpp"

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

std::vector<int64_t> VirtualBatch::State::fixed_sizes(const Setup& setup, int64_t rows,
                                                      bool for_cuts) const {
  if (setup.problem.trimming && options_.micro_batch_size) return setup.problem.trimming->sizes;
  return (for_cuts ? split_for_cuts : split_by)(setup.problem.batch_size(), rows);
}

void VirtualBatch::State::follow_fixed_size(Executor& executor, const Setup& setup, bool hand_out,
                                            StepReport& report) {
  std::vector<int64_t> sizes =
      fixed_sizes(setup, *options_.micro_batch_size, setup.strategy.is_cut());
  if (setup.strategy.is_cut()) {
    follow_cuts(executor, setup, std::move(sizes), hand_out);
    report.micro_batch_sizes = plan_.micro_batch_sizes;
    return;
  }
  if (setup.problem.loss.coupled() != nullptr) {
    const int64_t count = static_cast<int64_t>(sizes.size());
    plan_ = two_pass_plan(std::move(sizes), std::min(options_.retained_micro_batches, count),
                          setup.strategy.offloads_graphs());
    if (setup.strategy.offloads()) plan_ = with_offload(std::move(plan_), may_overlap(setup));
  } else {
    plan_ = stream_plan(std::move(sizes), has_penalty());
  }
  plan_.baseline_bytes = memory::stats(setup.problem.device).live;
  plan_.reason = given_size(options_) + " was given";
  Piece piece;
  piece.plan = plan_;
  piece.settled = true;
  run(executor, prepare(std::move(piece), hand_out), 0, setup.problem.device);
  report.micro_batch_sizes = plan_.micro_batch_sizes;
}

void VirtualBatch::State::follow_cuts(Executor& executor, const Setup& setup,
                                      std::vector<int64_t> sizes, bool hand_out) {
  const auto count = static_cast<int64_t>(sizes.size());
  const int64_t retained = std::min(options_.retained_micro_batches, count);
  const auto plan = [&](int64_t segments) {
    Plan cut =
        cut_plan(sizes, segments, retained, setup.problem.loss.coupled() != nullptr, has_penalty());
    return setup.strategy.offloads() ? with_offload(std::move(cut), may_overlap(setup)) : cut;
  };
  Piece piece;
  piece.settled = true;
  piece.plan = plan(/*segments=*/1);
  piece.plan.instructions.resize(sizes.size());  // the recordings
  plan_ = piece.plan;
  run(executor, piece, 0, setup.problem.device);
  piece.plan = plan(executor.segments());
  plan_ = piece.plan;
  plan_.baseline_bytes = memory::stats(setup.problem.device).live;
  auto& instructions = piece.plan.instructions;
  instructions.erase(instructions.begin(), instructions.begin() + count);
  run(executor, prepare(std::move(piece), hand_out), 0, setup.problem.device);
  setup.resources.findings->recordings_checked = true;
}

void VirtualBatch::State::follow_checkpoints(Executor& executor, const Setup& setup,
                                             const std::optional<int64_t>& budget, bool hand_out,
                                             StepReport& report) {
  CheckpointPlanner& planner = *memory_->checkpoints;
  const int64_t baseline = memory::stats(setup.problem.device).live;
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 4;
  const int64_t rows = options_.micro_batch_size.value_or(1);
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
  situation.fixed = options_.checkpoint_segments;
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
        offloaded(checkpoint_plan({size}, {segments.back()}, coupled, last && has_penalty()));
    const size_t end = rest.instructions.size() - 1;
    if (!together) follow(rest, 1, end);
    if (!together && last && hand_out) follow(rest, end, end + 1, /*counts=*/false);
    row += size;
  }
  plan_ = offloaded(setup.strategy.per_micro_batch()
                        ? checkpoint_plan(sizes, segments, coupled, has_penalty())
                        : cut_plan(sizes, stretches, /*retained=*/0, coupled, has_penalty()));
  if (together) {
    row = 0;
    const auto& instructions = plan_.instructions;
    const size_t end = instructions.size() - 1;
    const auto whole = std::find_if(
        instructions.begin(), instructions.end(),
        [](const Instruction& each) { return each.operation == Operation::whole_loss; });
    const auto loss = static_cast<size_t>(whole - instructions.begin());
    follow(plan_, sizes.size(), std::min(loss, end));
    // What the loss itself takes is not the cuts' to answer.
    if (coupled) follow(plan_, loss, loss + 1, /*counts=*/false);
    if (coupled) follow(plan_, loss + 1, end);
    // Looks at other rows are no part of what a plan needs.
    if (hand_out) follow(plan_, end, end + 1, /*counts=*/false);
  }
  if (!setup.strategy.per_micro_batch()) setup.resources.findings->recordings_checked = true;
  plan_.baseline_bytes = baseline;
  plan_.budget_bytes = budget;
  if (!coupled) plan_.predicted_peak_bytes = baseline + planner.estimate();
  planner.measured(most - baseline);
  plan_.reason =
      options_.checkpoint_segments
          ? "checkpoint_segments=" + std::to_string(*options_.checkpoint_segments) + " was given"
          : "the graph of a single sample does not fit";
  report.predicted_peak_bytes = plan_.predicted_peak_bytes;
  report.micro_batch_sizes = std::move(sizes);
}

bool VirtualBatch::State::may_overlap(const Setup& setup) const {
  // Of a fixed size nothing is predicted: what was too much is known where the limit is enforced.
  const bool known = !options_.memory_budget || setup.problem.device.is_cpu();
  return known && !memory_->in_turn;
}

Request VirtualBatch::State::request(const Setup& setup, int64_t budget) const {
  Request request;
  request.signature = kind_.layout;
  if (setup.strategy.is_cut()) request.signature += "|cut into " + std::to_string(segments_);
  request.offloaded = setup.strategy.offloads();
  if (request.offloaded) request.signature += "|offloaded";
  request.offloads_graphs = setup.strategy.offloads_graphs();
  if (request.offloads_graphs) request.signature += "|graphs, too";
  request.outputs_offload =
      request.offloaded && setup.problem.loss.coupled() != nullptr &&
      setup.problem.loss.coupled()->device().value_or(setup.problem.device) == setup.problem.device;
  request.dims = lengths_of(*setup.problem.inputs, *setup.problem.targets);
  if (setup.problem.trimming) plan_by_length(request, *setup.problem.trimming);
  request.batch_size = setup.problem.batch_size();
  request.baseline_bytes = memory::stats(setup.problem.device).live;
  request.budget_bytes = budget;
  request.penalty = has_penalty();
  request.two_pass = setup.problem.loss.coupled() != nullptr || setup.strategy.is_cut();
  request.measured = !setup.problem.device.is_cpu();
  request.whole_loss = setup.problem.loss.coupled() != nullptr;
  request.segments = setup.strategy.is_cut() ? segments_ : 0;
  request.whole_batch_only = knowledge_->whole;
  request.fails_on = knowledge_->few_rows.failing();
  return request;
}

void VirtualBatch::State::rehearse(const Setup& setup, int64_t budget) {
  if (planner_.settled_for(request(setup, budget))) return;
  const auto check = [this](const Executor& executor) {
    inputs_written_ = executor.forwards().wrote_inputs();
    check_inputs();
  };
  Rehearsal rehearsal{planner_, graph_choices_, setup, [&] { return request(setup, budget); },
                      check};
  rehearsal.setup.problem.on_micro_batch = nullptr;
  rehearsal.setup.problem.keep_outputs = false;
  const auto note = [&] {
    planning_ = planning_ || rehearsal.began;
    beside_plan_ = beside_plan_ || rehearsal.began;
  };
  try {
    rehearsal.run();
    note();
  } catch (...) {
    note();
    coupled_beyond_cuts_ = rehearsal.coupled_beyond_cuts;
    failed_rows_ = rehearsal.failed_rows;
    throw;
  }
}

bool VirtualBatch::State::keeps_graphs(const Problem& problem, const Strategy& strategy) const {
  return problem.loss.coupled() != nullptr && !strategy.is_cut() && options_.micro_batch_size &&
         options_.retained_micro_batches > 0;
}

bool VirtualBatch::State::offloads_graphs() const {
  return !graph_choices_.empty() && graph_choices_.offloads(kind_.shapes());
}

void VirtualBatch::State::choose_offload(Strategy& strategy) const {
  if (!strategy.offloads()) return;
  strategy.offload =
      offloads_graphs() ? Strategy::Offloads::graphs : Strategy::Offloads::boundaries;
}

void VirtualBatch::State::choose_graphs(const Setup& setup, int64_t budget) {
  const bool possible = setup.problem.loss.coupled() != nullptr && !setup.strategy.is_cut() &&
                        setup.strategy.offloads();
  if (!possible || !planner_.settled()) return;
  const std::string kind = kind_.shapes();
  if (graph_choices_.find(kind) != nullptr) return;
  Setup offload = setup;
  offload.strategy.offload = Strategy::Offloads::graphs;
  graph_choices_.choose(
      kind, planner_, *setup.resources.store, planner_.plan(), request(setup, budget),
      {[&] { return request(offload, budget); }, [&] { rehearse(offload, budget); }});
}

bool VirtualBatch::State::give_up_graphs() {
  return graph_choices_.give_up(kind_.shapes());
}

void VirtualBatch::State::follow_planner(Executor& executor, const Setup& setup, int64_t budget,
                                         bool hand_out, StepReport& report) {
  planner_.begin(request(setup, budget));
  planning_ = true;
  if (setup.problem.loss.coupled() != nullptr || setup.strategy.is_cut()) {
    const Piece piece = prepare(planner_.two_pass(), hand_out);
    report.micro_batch_sizes = piece.plan.micro_batch_sizes;
    report.predicted_peak_bytes = piece.plan.predicted_peak_bytes;
    if (setup.problem.trimming) setup.problem.trimming->sizes = report.micro_batch_sizes;
    plan_ = piece.plan;
    planner_.observe(piece, run_planned(executor, piece, 0, setup.problem.device));
    if (setup.strategy.is_cut()) setup.resources.findings->recordings_checked = true;
    plan_ = planner_.plan();
    if (!graph_choices_.empty()) {
      const GraphChoice* choice = graph_choices_.find(kind_.shapes());
      if (choice != nullptr) plan_.reason += "; " + choice->reason;
    }
    return;
  }
  while (std::optional<Piece> piece = planner_.next()) {
    const std::vector<int64_t>& sizes = piece->plan.micro_batch_sizes;
    report.micro_batch_sizes.insert(report.micro_batch_sizes.end(), sizes.begin(), sizes.end());
    // Set where one settled plan is the whole step, be it for the first time at this baseline.
    report.predicted_peak_bytes = piece->plan.predicted_peak_bytes;
    *piece = prepare(std::move(*piece), hand_out);
    if (setup.problem.trimming) setup.problem.trimming->at_least = piece->least_length;
    planner_.observe(*piece, run(executor, *piece, piece->first_row, setup.problem.device));
    executor.checks().examine();
  }
  if (setup.problem.trimming) setup.problem.trimming->at_least = 0;
  plan_ = planner_.plan();
}

}  // namespace infinitybatch
