#include "plan/planner.hpp"

#include "execute/schedule.hpp"
#include "execute/simulator.hpp"
#include "plan/candidates.hpp"
#include "plan/explain.hpp"
#include "plan/plans.hpp"
#include "plan/prediction.hpp"
#include "plan/probes.hpp"
#include "plan/refusals.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace infinitybatch {
namespace {

/// But for what is live when the step starts.
bool is_alike(const Request& request, const Request& other) {
  return request.signature == other.signature && request.dims == other.dims &&
         request.batch_size == other.batch_size && request.budget_bytes == other.budget_bytes &&
         request.whole_batch_only == other.whole_batch_only && request.fails_on == other.fails_on;
}

bool is_rehearsal(const Piece& piece) {
  return piece.plan.strategy == "rehearsal";
}

double ratio(int64_t above, int64_t predicted) {
  return static_cast<double>(above) / static_cast<double>(predicted);
}

}  // namespace

void Planner::begin(const Request& request) {
  const bool same =
      is_alike(request, request_) && request.baseline_bytes == request_.baseline_bytes;
  const plan::Learned* const before = kinds_.learned();
  request_ = request;
  progress_.row = 0;
  smallest_failed_ = false;
  attempt_ = {};
  kinds_.choose(request_);
  if (!same || &learned() != before || learned().shortages.may_try_again()) forget_settled_plan();
  if (settled_plan_) return;
  // Shorter samples may fit where those whose plan they would follow do not.
  if (kinds_.borrowed() && candidates().empty()) kinds_.stop_borrowing(request_);
  if (request.fails_on == 0 && !learned().profile) return;
  if (!candidates().empty()) return;
  if (request.fails_on > 0) plan::refuse_larger(request_, /*needed=*/0);
  find_smallest(/*needed_bytes=*/0);
}

std::vector<int64_t> Planner::next_sizes(Piece& piece) const {
  const int64_t remaining = request_.batch_size - progress_.row;
  if (const auto probe = plan::probe_size(request_, learned())) {
    const size_t count = plan::probed_micro_batches(request_);
    // The next rehearsal begins with all rows again.
    if (count > 1 && remaining < *probe * static_cast<int64_t>(count)) return {};
    piece.trace = plan::is_traced(request_, learned(), *probe, remaining);
    return std::vector<int64_t>(count, std::min(*probe, remaining));
  }
  const plan::Candidates candidates = this->candidates();
  if (!candidates.timed()) {
    if (const auto cap = candidates.to_time(progress_)) {
      piece.timed_cap = *cap;
      const int64_t count = candidates.count_to_time(*cap, progress_);
      return std::vector<int64_t>(static_cast<size_t>(count), request_.size_under(*cap));
    }
  }
  return candidates.split_rest(progress_.row);
}

std::optional<Piece> Planner::next() {
  attempt_.size = 0;
  if (progress_.row == request_.batch_size) return std::nullopt;
  if (request_.two_pass && settled()) return std::nullopt;
  Piece piece;
  if (progress_.row == 0 && settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else {
    std::vector<int64_t> sizes = next_sizes(piece);
    if (sizes.empty()) return std::nullopt;
    const int64_t end = std::accumulate(sizes.begin(), sizes.end(), progress_.row);
    const bool last = end == request_.batch_size;
    if (request_.two_pass) {
      piece.plan = plan::measured_plan(request_, std::move(sizes));
    } else {
      piece.plan = stream_plan(std::move(sizes), last && request_.penalty);
      if (!last) piece.plan.instructions.pop_back();  // handed out once, at the end
    }
    if (progress_.row == 0 && last && learned().shortages.last_resort() == 0 && settled()) {
      piece.plan.predicted_peak_bytes = prediction().peak(piece.plan.micro_batch_size());
      settled_plan_ = piece.plan;
    }
  }
  progress_.row += piece.plan.batch_size;
  attempt_.size = piece.plan.micro_batch_size();
  return piece;
}

Piece Planner::two_pass() {
  Piece piece;
  if (settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else {
    const plan::Prediction prediction = this->prediction();
    const int64_t size = request_.size_under(candidates().fastest());
    const int64_t retained = prediction.retained(size);
    piece.plan = prediction.plan(size, retained);
    // What a offloaded step finds on the device differs by a few bytes from what its rehearsal did,
    // so that another size may be the largest that fits: one that was not timed.
    if (prediction.knows_whole_loss(piece.plan.micro_batch_sizes.size()) &&
        (settled() || request_.offloaded)) {
      if (learned().profile) {
        const int64_t peak = prediction.corrected(piece.plan);
        const auto measured = retained == 0 ? prediction.measured_step(size) : std::nullopt;
        piece.plan.predicted_peak_bytes = std::min(peak, measured.value_or(peak));
      }
      if (settled()) settled_plan_ = piece.plan;
    }
  }
  progress_.row = request_.batch_size;
  attempt_ = {piece.plan.micro_batch_size(), piece.plan.offloads_graphs ? 0 : piece.plan.retained,
              piece.plan.overlaps};
  return piece;
}

void Planner::copy_in_turn(bool in_turn) {
  plan::Shortages& shortages = learned().shortages;
  if (shortages.in_turn() == in_turn) return;
  shortages.copy_in_turn(in_turn);
  forget_settled_plan();
}

void Planner::observe(const Piece& piece, const Measurement& measured) {
  if (kinds_.notice(request_, piece.plan.micro_batch_size(), measured.dims)) forget_settled_plan();
  const bool step_is_over = progress_.row == request_.batch_size && !is_rehearsal(piece);
  if (kinds_.borrowed()) {
    if (step_is_over) kinds_.followed(request_);
    if (!piece.settled) learn_times(piece, measured);
    return;
  }
  if (measured.whole_loss) {
    const int64_t held = prediction().held_beside_joined(piece.plan);
    learned().whole_loss.put(request_.batch_size, piece.plan.micro_batch_sizes.size() == 1,
                             {measured.whole_loss->rise - held, measured.whole_loss->net - held});
  }
  if (step_is_over) learned().shortages.end_step();
  if (piece.settled) return;
  const std::string& strategy = piece.plan.strategy;
  if (strategy == "replay" || strategy == "cut") return observe_two_pass(piece, measured);
  observe_streamed(piece, measured);
  learn_times(piece, measured);
  if (measured.trace && !learned().ragged) learned().learn(*measured.trace, request_);
}

void Planner::observe_two_pass(const Piece& piece, const Measurement& measured) {
  plan::Learned& learned = this->learned();
  if (!learned.profile) return;
  const int64_t baseline = request_.baseline_bytes;
  const int64_t above = measured.peak_bytes - baseline;
  // With fewer graphs than it kept the step takes no more.
  learned.steps[{request_.batch_size, piece.plan.micro_batch_size()}] = above;
  const int64_t predicted = prediction().simulated(piece.plan) - baseline;
  if (predicted <= 0 || ratio(above, predicted) <= learned.correction) return;
  learned.correction = ratio(above, predicted);
  forget_settled_plan();
}

void Planner::observe_streamed(const Piece& piece, const Measurement& measured) {
  plan::Learned& learned = this->learned();
  const int64_t size = piece.plan.micro_batch_size();
  // Workspace of a library, which stays: the next step finds it there when it begins.
  if (request_.measured && learned.peaks.empty()) {
    request_.baseline_bytes += measured.lasting_bytes;
  }
  const int64_t baseline = request_.baseline_bytes;
  const int64_t above = measured.peak_bytes - baseline;
  int64_t& peak = learned.peaks[size];
  peak = std::max(peak, above);
  const bool whole_step = piece.plan.batch_size == request_.batch_size && !is_rehearsal(piece);
  if (whole_step) learned.steps[{request_.batch_size, size}] = above;
  // In a rehearsal earlier pieces leave outputs behind that the simulation of one piece does not
  // know of; the step itself corrects.
  if (!learned.profile || request_.two_pass) return;
  const bool begun = progress_.row > piece.plan.batch_size;
  const int64_t predicted = simulate_peak(piece.plan, *learned.profile, baseline, begun) - baseline;
  if (predicted <= 0) return;
  if (request_.measured) {
    learned.ratios[size] = ratio(above, predicted);
  } else {
    learned.correction = std::max(learned.correction, ratio(above, predicted));
  }
}

void Planner::learn_times(const Piece& piece, const Measurement& measured) {
  const int64_t before = std::exchange(progress_.timed_cap, piece.timed_cap);
  if (piece.timed_cap == 0) return;
  learned().timings.learn(piece.timed_cap, {piece.plan.micro_batch_size(), measured.seconds,
                                            measured.again, /*first=*/piece.timed_cap != before,
                                            learned().ragged, kinds_.work_ratio()});
}

void Planner::saw_whole_loss(const Plan& plan, MicroBatchProfile::Effect effect) {
  const int64_t held = prediction().held_beside_joined(plan);
  const bool one = plan.micro_batch_sizes.size() == 1;
  const MicroBatchProfile::Effect beside{effect.rise - held, effect.net - held};
  if (!learned().whole_loss.raise(request_.batch_size, one, beside)) return;
  learned().steps.clear();
  forget_settled_plan();
}

bool Planner::foresees_whole_loss(const Plan& plan) const {
  return prediction().whole_loss(plan.micro_batch_sizes.size()).has_value();
}

void Planner::find_smallest(int64_t needed_bytes) {
  plan::Shortages& shortages = learned().shortages;
  if (shortages.find_last_resort(request_)) return;
  shortages.end_refused_step();
  smallest_failed_ = true;
  plan::refuse_smallest(request_, learned(), needed_bytes);
}

void Planner::ran_out_of_memory(int64_t needed_bytes, bool in_loss) {
  forget_settled_plan();
  const Attempt failed = std::exchange(attempt_, {});
  if (kinds_.borrowed() && failed.size > 0) return kinds_.stop_borrowing(request_);
  plan::Shortages& shortages = learned().shortages;
  if (failed.overlaps) return shortages.copy_in_turn(true);
  if (failed.retained > 0) return shortages.lower_retained(failed.retained / 2);
  const std::string all = "all " + std::to_string(request_.batch_size) + " samples";
  smallest_failed_ = in_loss;
  if (in_loss) plan::refuse(request_, needed_bytes, "the loss on the outputs of " + all);
  if (failed.size == 0) {
    plan::refuse(request_, needed_bytes, "The step, before its first micro-batch,");
  }
  if (request_.fails_on > 0) {
    shortages.lower_size(failed.size - 1);
    if (candidates().empty()) plan::refuse_larger(request_, needed_bytes);
    return;
  }
  if (request_.whole_batch_only) {
    plan::refuse(request_, needed_bytes, "one micro-batch of " + all + " (they are coupled)");
  }
  if (!shortages.fail(failed.size)) return find_smallest(needed_bytes);
  shortages.lower_size(failed.size - 1);
  if (!learned().profile) learned().traces.clear();
}

bool Planner::settled() const {
  if (settled_plan_) return true;  // asked in each step: without a simulation for each size
  return kinds_.learned() != nullptr && plan::is_settled(request_, learned());
}

bool Planner::settled_for(const Request& request) const {
  return settled_plan_ && !kinds_.borrowed() && is_alike(request, request_);
}

Plan Planner::plan() const {
  if (!settled_plan_) return make_plan();
  // The same in every step from now on.
  if (!full_plan_) full_plan_ = make_plan();
  return *full_plan_;
}

Plan Planner::make_plan() const {
  Plan plan;
  if (settled_plan_) {
    plan = *settled_plan_;
  } else if (const int64_t cap = candidates().fastest(); request_.two_pass) {
    plan = prediction().plan(cap, /*retained=*/0);
  } else {
    plan = stream_plan(split_evenly(request_.batch_size, cap), request_.penalty);
  }
  plan::explain(plan, request_, kinds_, settled());
  return plan;
}

void Planner::forget_settled_plan() {
  settled_plan_.reset();
  full_plan_.reset();
}

std::optional<int64_t> Planner::peak_at(int64_t cap) const {
  if (kinds_.learned() == nullptr || !learned().profile) return std::nullopt;
  return prediction().peak(request_.size_under(cap));
}

bool Planner::whole_batch_may_fit() const {
  return !request_.measured || prediction().fits(request_.batch_size);
}

}  // namespace infinitybatch
