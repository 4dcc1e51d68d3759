#include "plan/planner.hpp"

#include "execute/schedule.hpp"
#include "execute/simulator.hpp"
#include "plan/candidates.hpp"
#include "plan/explain.hpp"
#include "plan/next_sizes.hpp"
#include "plan/packing.hpp"
#include "plan/plans.hpp"
#include "plan/prediction.hpp"
#include "plan/probes.hpp"
#include "plan/refusals.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace infinitybatch {
namespace {

bool is_rehearsal(const Piece& piece) {
  return piece.plan.strategy == "rehearsal";
}

double ratio(int64_t above, int64_t predicted) {
  return static_cast<double>(above) / static_cast<double>(predicted);
}

}  // namespace

void Planner::begin(const Request& request) {
  begin_rehearsal(request);
  if (!nothing_fits()) return;
  if (request_.fails_on > 0) plan::refuse_larger(request_, /*needed=*/0);
  const int64_t smallest = request_.size_under(plan::kSmallProbe);
  find_smallest(learned().profile ? 0 : prediction().peak(smallest));
}

bool Planner::nothing_fits() const {
  if (settled_plan_) return false;
  // A device that refuses nothing would not say so by itself: there a bound is enough to refuse.
  const bool bounded = request_.measured && request_.segments > 0 && learned().irregular;
  if (request_.fails_on == 0 && !learned().profile && !bounded) return false;
  // A bound on longer rows is no reason to refuse them.
  return !plan::length_to_learn(request_, learned(), /*row=*/0) && candidates().empty();
}

void Planner::begin_rehearsal(const Request& request) {
  // The loss takes the same, whichever boundary activations are kept.
  std::optional<plan::WholeLoss> loss;
  if (kinds_.learned() != nullptr && request.differs_in_kept_alone(given_)) {
    loss = learned().whole_loss;
  }
  const bool same = request.is_alike(given_) && request.baseline_bytes == request_.baseline_bytes;
  const bool same_rows = request.signature == given_.signature && request.dims == given_.dims &&
                         request.batch_size == given_.batch_size &&
                         request.lengths == given_.lengths;
  const plan::Learned* const before = kinds_.learned();
  std::shared_ptr<const plan::Packing> packing = std::move(request_.packing);
  request_ = given_ = request;
  progress_.row = 0;
  smallest_failed_ = false;
  attempt_ = {};
  choose_lengths();
  if (loss && learned().whole_loss.empty()) learned().whole_loss = *std::move(loss);
  if (!same || &learned() != before || learned().shortages.may_try_again()) forget_settled_plan();
  if (same_rows && &learned() == before && !request_.lengths.empty()) {
    request_.packing = std::move(packing);  // whatever is live, and may be
  }
  if (settled_plan_) return;
  if (!request_.packing) pack();
  // Shorter samples may fit where those whose plan they would follow do not.
  if (kinds_.borrowed() && candidates().empty()) {
    kinds_.stop_borrowing(request_);
    pack();
  }
}

void Planner::choose_lengths() {
  kinds_.choose(request_);
  if (request_.lengths.empty()) return;
  plan::Learned& known = learned();
  // Longer ones may be longer than all of a batch.
  if (!known.traces.empty() && known.traces.back().length > request_.lengths.front()) {
    known.traces.clear();
  }
  const bool told = known.profile || plan::may_probe_at_length(request_, known);
  if (told && !known.irregular && !request_.whole_batch_only && request_.fails_on == 0) return;
  request_.lengths.clear();
  request_.signature += "|by rows";
  kinds_.choose(request_);
}

void Planner::pack() {
  request_.packing.reset();
  if (request_.lengths.empty() || !learned().profile) return;
  request_.packing = std::make_shared<plan::Packing>(request_, *learned().profile);
}

std::optional<Piece> Planner::next() {
  attempt_.size = 0;
  if (progress_.row == request_.batch_size) return std::nullopt;
  if (request_.two_pass && settled()) return std::nullopt;
  Piece piece;
  piece.first_row = progress_.row;
  if (progress_.row == 0 && settled_plan_) {
    piece.plan = *settled_plan_;
    piece.size = settled_size_;
    piece.settled = true;
  } else {
    std::vector<int64_t> sizes = plan::next_sizes(request_, learned(), progress_, piece);
    if (sizes.empty()) return std::nullopt;
    const int64_t end = std::accumulate(sizes.begin(), sizes.end(), piece.first_row);
    const bool last = end == request_.batch_size;
    std::vector<int64_t> lengths = request_.lengths_of(sizes, piece.first_row);
    for (int64_t& length : lengths) length = std::max(length, piece.least_length);
    if (request_.two_pass) {
      piece.plan = plan::measured_plan(request_, std::move(sizes), piece.first_row);
    } else {
      piece.plan = stream_plan(std::move(sizes), last && request_.penalty);
      if (!last) piece.plan.instructions.pop_back();  // handed out once, at the end
    }
    piece.plan.lengths = std::move(lengths);
    if (progress_.row == 0 && last && learned().shortages.last_resort() == 0 && settled()) {
      piece.plan.predicted_peak_bytes = prediction().peak(piece.size);
      settle(piece);
    }
  }
  progress_.row = piece.first_row + piece.plan.batch_size;
  attempt_.size = piece.size;
  attempt_.row = piece.first_row;
  attempt_.rows = piece.plan.micro_batch_size();
  attempt_.length = piece.plan.lengths.empty() ? 0 : piece.plan.lengths.front();
  attempt_.learns = piece.trace || piece.ahead;
  return piece;
}

Piece Planner::two_pass() {
  Piece piece;
  if (settled_plan_) {
    piece.plan = *settled_plan_;
    piece.size = settled_size_;
    piece.settled = true;
  } else {
    const plan::Prediction prediction = this->prediction();
    const int64_t size = request_.size_under(candidates().fastest());
    piece.plan = prediction.plan(size, prediction.kept_samples(size));
    piece.size = size;
    // What a offloaded step finds on the device differs by a few bytes from what its rehearsal did,
    // so that another size may be the largest that fits: one that was not timed.
    if (prediction.knows_whole_loss(piece.plan.micro_batch_sizes.size()) &&
        (settled() || request_.offloaded)) {
      if (learned().profile) {
        const int64_t peak = prediction.corrected(piece.plan);
        const auto measured =
            piece.plan.retained == 0 ? prediction.measured_step(size) : std::nullopt;
        piece.plan.predicted_peak_bytes = std::min(peak, measured.value_or(peak));
      }
      if (settled()) settle(piece);
    }
  }
  progress_.row = request_.batch_size;
  attempt_ = {};
  attempt_.size = piece.size;
  attempt_.kept = piece.plan.offloads_graphs ? 0 : piece.plan.retained_samples();
  attempt_.overlaps = piece.plan.overlaps;
  return piece;
}

void Planner::copy_in_turn(bool in_turn) {
  plan::Shortages& shortages = learned().shortages;
  if (shortages.in_turn() == in_turn) return;
  shortages.copy_in_turn(in_turn);
  forget_settled_plan();
}

void Planner::observe(const Piece& piece, const Measurement& measured) {
  // Of rows that the caller has sorted by length it is known that they differ.
  const bool sorted = !given_.lengths.empty() && !request_.lengths.empty();
  const Request& kind = request_.length > 0 ? given_ : request_;
  if (!sorted && kinds_.notice(kind, piece.plan.micro_batch_size(), measured.dims)) {
    if (learned().ragged) {
      request_.lengths.clear();
      request_.packing.reset();
    }
    forget_settled_plan();
  }
  const bool step_is_over = progress_.row == request_.batch_size && !is_rehearsal(piece);
  if (kinds_.borrowed()) {
    if (step_is_over) kinds_.followed(request_);
    if (!piece.settled) learn_times(piece, measured);
    return;
  }
  if (measured.whole_loss) {
    const int64_t held = prediction().held_beside_joined(piece.plan);
    learned().whole_loss.put(
        {request_.batch_size, piece.plan.micro_batch_sizes.size() == 1, request_.length},
        {measured.whole_loss->rise - held, measured.whole_loss->net - held});
  }
  if (step_is_over) learned().shortages.end_step();
  if (request_.packing && !is_rehearsal(piece)) compare(piece, measured.peak_bytes);
  if (piece.settled) {
    // Of a plan that is made anew, since memory has run out or the loss takes more, this is what is
    // known to fit.
    const int64_t above = measured.peak_bytes - request_.baseline_bytes;
    if (request_.two_pass && step_is_over && !request_.packing && above > 0) {
      learned().steps[{request_.batch_size, piece.size}] = above;
    }
    return;
  }
  const std::string& strategy = piece.plan.strategy;
  if (strategy == "replay" || strategy == "cut") return observe_two_pass(piece, measured);
  observe_streamed(piece, measured);
  learn_times(piece, measured);
  if (measured.trace && !learned().ragged) learn(piece, *measured.trace);
}

void Planner::learn(const Piece& piece, MicroBatchTrace trace) {
  const bool fit = learned().profile.has_value();
  if (!fit && !request_.lengths.empty() && piece.least_length == 0) {
    learned().first = std::move(trace);
    return;
  }
  if (!request_.lengths.empty()) trace.length = piece.plan.lengths.front();
  const auto alone = [&] {
    return simulate_peak(piece.plan, *learned().profile, /*baseline=*/0, /*begun=*/true);
  };
  // Where three lengths do not tell others, as kernels round them, what is between is off as well.
  constexpr size_t kTold = 3;
  const bool predicted = fit && learned().profile->lengths().size() >= kTold;
  const int64_t expected = predicted ? alone() : 0;
  learned().learn(std::move(trace), request_);
  if (expected > 0) {
    learned().roughness = std::max(learned().roughness, ratio(alone(), expected));
  }
  if (request_.lengths.empty()) return;
  if (learned().irregular) {
    request_.lengths.clear();
    return;
  }
  if (fit) {
    learned().correction = learned().roughness;  // that of before was of what was known then
  } else if (learned().profile) {
    learned().shortages.tell_in_parts(plan::Packing::kUnit);
  }
  pack();
}

void Planner::compare(const Piece& piece, int64_t peak_bytes) {
  constexpr double kExact = .01;
  const auto& predicted = piece.plan.predicted_peak_bytes;
  plan::Learned& learned = this->learned();
  const int64_t baseline = request_.baseline_bytes;
  if (!predicted || peak_bytes <= baseline || *predicted <= baseline) return;
  const double off = ratio(peak_bytes - baseline, *predicted - baseline);
  if (off > 1) {  // whatever else is learned
    learned.correction *= off;
    forget_settled_plan();
  }
  if (std::abs(off - 1) > kExact) refit_at(prediction().length_of_peak(piece.plan));
}

void Planner::refit_at(int64_t length) {
  constexpr int kRefits = 6;
  if (learned().refits >= kRefits) return;
  ++learned().refits;
  learned().wanted_length = length;
  forget_settled_plan();
}

void Planner::observe_two_pass(const Piece& piece, const Measurement& measured) {
  plan::Learned& learned = this->learned();
  const int64_t baseline = request_.baseline_bytes;
  const int64_t above = measured.peak_bytes - baseline;
  // With fewer graphs than it kept the step takes no more.
  if (!request_.packing) learned.steps[{request_.batch_size, piece.size}] = above;
  if (!learned.profile) return;
  const int64_t predicted = prediction().simulated(piece.plan) - baseline;
  if (predicted <= 0 || ratio(above, predicted) <= learned.correction) return;
  learned.correction = ratio(above, predicted);
  forget_settled_plan();
}

void Planner::observe_streamed(const Piece& piece, const Measurement& measured) {
  plan::Learned& learned = this->learned();
  const int64_t size = piece.size;
  // Workspace of a library, which stays: the next step finds it there when it begins.
  if (request_.measured && learned.peaks.empty()) {
    request_.baseline_bytes += measured.lasting_bytes;
  }
  const int64_t baseline = request_.baseline_bytes;
  const int64_t above = measured.peak_bytes - baseline;
  int64_t& peak = learned.peaks[size];
  peak = std::max(peak, above);
  const bool whole_step = piece.plan.batch_size == request_.batch_size && !is_rehearsal(piece);
  if (whole_step && !request_.packing) learned.steps[{request_.batch_size, size}] = above;
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
  const bool first = piece.timed_cap != before;
  std::vector<double> work;
  int64_t row = piece.first_row;
  for (const int64_t size : piece.plan.micro_batch_sizes) {
    if (request_.packing) work.push_back(request_.packing->work(row, size));
    row += size;
  }
  learned().timings.learn(piece.timed_cap,
                          {piece.plan.micro_batch_size(), measured.seconds, measured.again, first,
                           /*begins=*/piece.first_row == 0 && !request_.two_pass,
                           /*average=*/learned().ragged || request_.packing, kinds_.work_ratio(),
                           request_.packing ? &work : nullptr, request_.rehearses_sizes()});
}

void Planner::saw_whole_loss(const Plan& plan, MicroBatchProfile::Effect effect) {
  const int64_t held = prediction().held_beside_joined(plan);
  const bool one = plan.micro_batch_sizes.size() == 1;
  const MicroBatchProfile::Effect beside{effect.rise - held, effect.net - held};
  const auto more = learned().whole_loss.raise({request_.batch_size, one, request_.length}, beside);
  if (more == 0) return;
  // What a step was measured to take goes up by no more than what its loss takes.
  if (!more) learned().steps.clear();
  for (auto& [of, above] : learned().steps) above += more.value_or(0);
  forget_settled_plan();
}

void Planner::saw_second_pass(int64_t live) {
  const int64_t held = live - request_.baseline_bytes;
  if (held <= learned().held) return;
  learned().held = held;
  if (!learned().profile) forget_settled_plan();
}

void Planner::second_pass_ran_out(const Piece& piece) {
  // A profile is corrected by what was refused; and below one sample nothing is left.
  if (learned().profile || piece.size <= 1) return;
  int64_t& most = learned().refused[piece.size];
  most = std::max(most, request_.budget_bytes + request_.reserved_bytes - request_.baseline_bytes);
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
  if (failed.kept > 0) return shortages.lower_kept(failed.kept / 2);
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
  if (probe_shorter(failed)) return;
  // Of the longest rows not even one fits.
  if (failed.learns && failed.rows == 1) return find_smallest(needed_bytes);
  if (raise_prediction(failed, needed_bytes)) return;
  if (!shortages.fail(failed.size)) return find_smallest(needed_bytes);
  // Below two samples, where only shorter ones are split otherwise, half of what they take.
  shortages.lower_size(request_.packing ? failed.size / 2 : failed.size - 1);
  if (!learned().profile) learned().traces.clear();
}

bool Planner::probe_shorter(const Attempt& failed) {
  plan::Learned& known = learned();
  if (request_.lengths.empty() || failed.rows < plan::kSmallProbe) return false;
  if (known.profile && !failed.learns) return false;
  const int64_t too_long =
      failed.rows == plan::kSmallProbe ? std::min(known.too_long, failed.length) : known.too_long;
  const int64_t reference = known.profile ? known.reference_limit
                                          : std::min(known.reference_limit, failed.length * 3 / 5);
  // What is told a second time would be answered by the same probe.
  if (too_long == known.too_long && reference == known.reference_limit) return false;
  known.too_long = too_long;
  known.reference_limit = reference;
  if (!known.profile) known.traces.clear();
  return true;
}

bool Planner::raise_prediction(const Attempt& failed, int64_t needed_bytes) {
  constexpr int kMostRaises = 6;
  const bool cut = request_.rehearses_sizes() && learned().raises < kMostRaises &&
                   !plan::probe_size(request_, learned());
  if (!(cut || request_.packing) || failed.size < plan::kSmallProbe * request_.unit()) return false;
  // More than what was refused may have been needed: twice as much more each time.
  const double least = 1 + 0.01 * std::exp2(cut ? learned().raises++ : 0);
  const int64_t baseline = request_.baseline_bytes;
  const int64_t predicted = prediction().peak(failed.size) - baseline;
  const double off = predicted > 0 ? ratio(needed_bytes - baseline, predicted) : 1;
  learned().correction *= std::max(least, off);
  if (request_.packing) {
    refit_at(request_.lengths[static_cast<size_t>(failed.row)]);
    return true;
  }
  // Where no other size is foreseen to fit, the one that failed is to blame.
  const plan::Candidates left = candidates();
  return !left.empty() && prediction().fits(request_.size_under(left.fastest())) &&
         request_.size_under(left.fastest()) < failed.size;
}

bool Planner::settled() const {
  if (settled_plan_) return true;  // asked in each step: without a simulation for each size
  return kinds_.learned() != nullptr && plan::is_settled(request_, learned());
}

bool Planner::settled_for(const Request& request) const {
  return settled_plan_ && !kinds_.borrowed() && request.is_alike(given_);
}

void Planner::plan_alone() {
  if (!kinds_.borrowed()) return;
  forget_settled_plan();
  kinds_.stop_borrowing(request_);
}

Plan Planner::plan() const {
  if (!settled_plan_) return make_plan();
  // The same in every step from now on.
  if (!full_plan_) full_plan_ = make_plan();
  return *full_plan_;
}

int64_t Planner::chosen_size() const {
  return settled_plan_ ? settled_size_ : request_.size_under(candidates().fastest());
}

Plan Planner::make_plan() const {
  Plan plan;
  if (settled_plan_) {
    plan = *settled_plan_;
  } else if (const int64_t cap = candidates().fastest(); request_.two_pass) {
    plan = prediction().plan(cap, /*kept=*/0);
  } else {
    plan = plan::streamed_plan(request_, cap, request_.penalty);
  }
  plan::explain(plan, request_, kinds_, settled());
  return plan;
}

void Planner::settle(const Piece& piece) {
  settled_plan_ = piece.plan;
  settled_size_ = piece.size;
}

void Planner::forget_settled_plan() {
  settled_plan_.reset();
  full_plan_.reset();
}

std::optional<int64_t> Planner::peak_at(int64_t cap) const {
  const bool known = kinds_.learned() != nullptr &&
                     (learned().profile || (request_.segments > 0 && !learned().peaks.empty()));
  if (!known) return std::nullopt;
  return prediction().peak(request_.size_under(cap * request_.unit()));
}

std::optional<int64_t> Planner::smallest_budget() const {
  return plan::smallest_budget(request_, learned());
}

bool Planner::whole_batch_may_fit() const {
  return !request_.measured || prediction().fits(request_.whole());
}

}  // namespace infinitybatch
