// What the planner does differently for a coupled loss, and for tapes that are cut: it measures in
// a rehearsal, then plans passes over the whole batch.
#include "core/counted.hpp"
#include "execute/schedule.hpp"
#include "execute/simulator.hpp"
#include "plan/planner.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace infinitybatch {

Plan Planner::measured_plan(std::vector<int64_t> sizes) const {
  if (request_.segments > 0) {
    Plan plan = cut_rehearsal_plan(std::move(sizes), request_.segments, request_.whole_loss);
    return request_.offloaded ? with_offload(std::move(plan), /*overlap=*/false) : plan;
  }
  if (!request_.two_pass) return stream_plan(std::move(sizes), /*penalty=*/false);
  Plan plan = rehearsal_plan(std::move(sizes), request_.offloads_graphs);
  return request_.offloaded ? with_offload(std::move(plan), /*overlap=*/false) : plan;
}

Plan Planner::whole_plan(int64_t size, int64_t retained, bool overlap) const {
  std::vector<int64_t> sizes = split_evenly(request_.batch_size, size);
  if (request_.offloads_graphs) retained = static_cast<int64_t>(sizes.size());
  Plan plan = request_.segments == 0
                  ? two_pass_plan(std::move(sizes), retained, request_.offloads_graphs)
                  : cut_plan(std::move(sizes), request_.segments, retained, request_.whole_loss,
                             request_.penalty);
  return request_.offloaded ? with_offload(std::move(plan), overlap) : plan;
}

size_t Planner::probed_micro_batches() const {
  constexpr int64_t kRows = 8;  // two of the larger probe
  return request_.segments > 0 && request_.batch_size >= kRows ? 2 : 1;
}

std::string Planner::smallest_plan() const {
  if (!request_.two_pass) return "a single sample";
  const std::string all = "all " + std::to_string(request_.batch_size);
  if (request_.segments < 2) {
    return "a few samples at a time, beside the outputs and the loss of " + all;
  }
  return "a few samples at a time, beside what " + all + " of them leave in front of " +
         each_of(request_.segments - 1, "op that sees the whole batch",
                 "ops that see the whole batch") +
         " (BatchNorm in training)";
}

std::optional<MicroBatchProfile::Effect> Planner::whole_loss(size_t micro_batches) const {
  if (!request_.whole_loss) return MicroBatchProfile::Effect();
  const bool one = micro_batches == 1;
  for (const bool measured : {one, !one}) {
    const auto found = known_->whole_loss.find({request_.batch_size, measured});
    if (found != known_->whole_loss.end()) return found->second;
  }
  return std::nullopt;
}

int64_t Planner::held_beside_joined(const Plan& plan) const {
  const auto count = static_cast<int64_t>(plan.micro_batch_sizes.size());
  const bool copied = count > 1 || request_.copies_one;
  if (!known_->profile || !request_.whole_loss || !copied || plan.offloads_graphs) return 0;
  int64_t bytes = 0;
  for (int64_t i = count - plan.retained; i < count; ++i) {
    bytes += outputs_of(*known_->profile, plan, plan.micro_batch_sizes[static_cast<size_t>(i)]);
  }
  return bytes;
}

MicroBatchProfile::Effect Planner::whole_loss_of(const Plan& plan) const {
  const auto known = whole_loss(plan.micro_batch_sizes.size());
  if (!known) return {};
  const int64_t held = held_beside_joined(plan);
  return {known->rise + held, known->net + held};
}

bool Planner::knows_whole_loss(size_t micro_batches) const {
  return !request_.whole_loss ||
         known_->whole_loss.contains({request_.batch_size, micro_batches == 1});
}

void Planner::saw_whole_loss(const Plan& plan, MicroBatchProfile::Effect effect) {
  const bool one = plan.micro_batch_sizes.size() == 1;
  const int64_t held = held_beside_joined(plan);
  effect = {effect.rise - held, effect.net - held};
  const auto [found, is_new] = known_->whole_loss.try_emplace({request_.batch_size, one}, effect);
  MicroBatchProfile::Effect& known = found->second;
  if (!is_new && effect.rise <= known.rise && effect.net <= known.net) return;
  known = {std::max(known.rise, effect.rise), std::max(known.net, effect.net)};
  known_->steps.clear();
  forget_settled_plan();
}

bool Planner::foresees_whole_loss(const Plan& plan) const {
  return whole_loss(plan.micro_batch_sizes.size()).has_value();
}

int64_t Planner::two_pass_peak(int64_t size, int64_t retained) const {
  return peak_of(whole_plan(size, retained, request_.offloads_graphs && !known_->in_turn));
}

int64_t Planner::peak_of(const Plan& plan) const {
  return simulate_peak(plan, *known_->profile, request_.baseline_bytes, /*begun=*/false,
                       whole_loss_of(plan), request_.outputs_offload);
}

int64_t Planner::corrected(int64_t peak) const {
  const int64_t baseline = request_.baseline_bytes;
  const auto above = static_cast<double>(peak - baseline);
  return baseline + static_cast<int64_t>(std::ceil(above * known_->correction));
}

/// Whether there is room for what comes and leaves while other micro-batches compute.
bool Planner::overlaps(int64_t size) const {
  return request_.offloaded && known_->profile && !known_->in_turn &&
         corrected(peak_of(whole_plan(size, /*retained=*/0, /*overlap=*/true))) <=
             request_.budget_bytes;
}

void Planner::copy_in_turn(bool in_turn) {
  if (std::exchange(known_->in_turn, in_turn) != in_turn) forget_settled_plan();
}

/// Graphs that fit beside everything else. None before the loss has been measured: it comes while
/// all of them are held.
int64_t Planner::most_retained(int64_t size) const {
  const int64_t count = (request_.batch_size + size - 1) / size;
  if (request_.offloaded || !request_.keeps_graphs || !known_->profile ||
      !whole_loss(static_cast<size_t>(count)))
    return 0;
  const auto fit = [&](int64_t retained) {
    return corrected(two_pass_peak(size, retained)) <= request_.budget_bytes;
  };
  int64_t low = 0;
  int64_t high = std::min(count, known_->most_retained) + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fit(middle) ? low : high) = middle;
  }
  return low;
}

double Planner::kept_share(int64_t size) const {
  return request_.two_pass ? kept_share(size, most_retained(size)) : 0;
}

double Planner::kept_share(int64_t size, int64_t retained) const {
  const int64_t kept = std::min(size * retained, request_.batch_size);
  return static_cast<double>(kept) / static_cast<double>(request_.batch_size);
}

Piece Planner::two_pass() {
  Piece piece;
  if (settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else {
    const int64_t size = size_under(fastest());
    const int64_t retained = most_retained(size);
    piece.plan = whole_plan(size, retained, overlaps(size));
    // What a offloaded step finds on the device differs by a few bytes from what its rehearsal did,
    // so that another size may be the largest that fits: one that was not timed.
    if (knows_whole_loss(piece.plan.micro_batch_sizes.size()) &&
        (settled() || request_.offloaded)) {
      if (known_->profile) {
        const int64_t peak = corrected(peak_of(piece.plan));
        const auto measured = retained == 0 ? measured_step(size) : std::nullopt;
        piece.plan.predicted_peak_bytes = std::min(peak, measured.value_or(peak));
      }
      if (settled()) settled_plan_ = piece.plan;
    }
  }
  row_ = request_.batch_size;
  attempted_ = piece.plan.micro_batch_size();
  attempted_retained_ = piece.plan.offloads_graphs ? 0 : piece.plan.retained;
  attempted_overlap_ = piece.plan.overlaps;
  return piece;
}

void Planner::observe_two_pass(const Piece& piece, const Measurement& measured) {
  if (!known_->profile) return;
  const int64_t baseline = request_.baseline_bytes;
  // With fewer graphs than it kept the step takes no more.
  known_->steps[{request_.batch_size, piece.plan.micro_batch_size()}] =
      measured.peak_bytes - baseline;
  const int64_t predicted = peak_of(piece.plan) - baseline;
  if (predicted <= 0) return;
  const auto ratio =
      static_cast<double>(measured.peak_bytes - baseline) / static_cast<double>(predicted);
  if (ratio <= known_->correction) return;
  known_->correction = ratio;
  forget_settled_plan();
}

}  // namespace infinitybatch
