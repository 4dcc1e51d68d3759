// What the planner does differently for a coupled loss: it measures in a rehearsal, then plans two
// passes over the whole batch.
#include <infinitybatch/execute/simulator.hpp>
#include <infinitybatch/plan/planner.hpp>

#include <algorithm>
#include <cmath>

namespace infinitybatch {

Plan Planner::measured_plan(std::vector<int64_t> sizes) const {
  return request_.two_pass ? rehearsal_plan(std::move(sizes))
                           : stream_plan(std::move(sizes), /*penalty=*/false);
}

MicroBatchProfile::Effect Planner::whole_loss() const {
  const auto found = known_->whole_loss.find(request_.batch_size);
  return found == known_->whole_loss.end() ? MicroBatchProfile::Effect() : found->second;
}

int64_t Planner::two_pass_peak(int64_t size, int64_t retained) const {
  return simulate_peak(two_pass_plan(split_evenly(request_.batch_size, size), retained),
                       *known_->profile, request_.baseline_bytes, /*begun=*/false, whole_loss());
}

/// Graphs that fit beside everything else. None before the loss has been measured: it comes while
/// all of them are held.
int64_t Planner::most_retained(int64_t size) const {
  if (!known_->profile || !known_->whole_loss.contains(request_.batch_size)) return 0;
  const int64_t baseline = request_.baseline_bytes;
  const auto fit = [&](int64_t retained) {
    const auto above = static_cast<double>(two_pass_peak(size, retained) - baseline);
    return baseline + static_cast<int64_t>(std::ceil(above * known_->correction)) <=
           request_.budget_bytes;
  };
  const int64_t count = (request_.batch_size + size - 1) / size;
  int64_t low = 0;
  int64_t high = std::min(count, known_->most_retained) + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fit(middle) ? low : high) = middle;
  }
  return low;
}

Piece Planner::two_pass() {
  Piece piece;
  if (settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else {
    const int64_t size = size_under(fastest());
    const int64_t retained = most_retained(size);
    piece.plan = two_pass_plan(split_evenly(request_.batch_size, size), retained);
    if (known_->whole_loss.contains(request_.batch_size) && settled()) {
      if (known_->profile) {
        const auto above =
            static_cast<double>(two_pass_peak(size, retained) - request_.baseline_bytes);
        piece.plan.predicted_peak_bytes =
            request_.baseline_bytes + static_cast<int64_t>(std::ceil(above * known_->correction));
      }
      settled_plan_ = piece.plan;
    }
  }
  row_ = request_.batch_size;
  attempted_ = piece.plan.micro_batch_size();
  return piece;
}

void Planner::observe_two_pass(const Piece& piece, const Measurement& measured) {
  if (!known_->profile) return;
  const int64_t baseline = request_.baseline_bytes;
  const int64_t predicted =
      simulate_peak(piece.plan, *known_->profile, baseline, /*begun=*/false, whole_loss()) -
      baseline;
  if (predicted <= 0) return;
  const auto ratio =
      static_cast<double>(measured.peak_bytes - baseline) / static_cast<double>(predicted);
  if (ratio <= known_->correction) return;
  known_->correction = ratio;
  forget_settled_plan();
}

}  // namespace infinitybatch
