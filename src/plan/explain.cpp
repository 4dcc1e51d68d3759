// A plan with what `explain()` prints: candidates, times, and why it was chosen.
#include "plan/planner.hpp"

#include "execute/schedule.hpp"

#include <cstdio>

namespace infinitybatch {

Plan Planner::plan() const {
  if (!settled_plan_) return make_plan();
  // The same in every step from now on.
  if (!full_plan_) full_plan_ = make_plan();
  return *full_plan_;
}

Plan Planner::make_plan() const {
  const int64_t cap = fastest();
  Plan plan = settled_plan_ ? *settled_plan_
              : request_.two_pass
                  ? whole_plan(cap, /*retained=*/0, overlaps(cap))
                  : stream_plan(split_evenly(request_.batch_size, cap), request_.penalty);
  plan.budget_bytes = request_.budget_bytes;
  plan.baseline_bytes = request_.baseline_bytes;
  if (!plan.predicted_peak_bytes) {
    plan.predicted_peak_bytes = predicted_peak(plan.micro_batch_size());
  }
  for (int64_t power = 1;; power *= 2) {
    // The chosen size stands in its place, whether a power of two or not.
    const bool chosen_next = cap > power / 2 && cap < power;
    if (chosen_next) plan.candidates.push_back(candidate(cap));
    if (plan.candidates.empty() || plan.candidates.back().micro_batch_size < size_under(power)) {
      plan.candidates.push_back(candidate(power));
    }
    if (power >= request_.batch_size) break;
  }
  if (const Timings::Timing* timing = known_->timings.of(cap)) {
    plan.predicted_seconds = timing->estimate(kept_share(plan.micro_batch_size(), plan.retained)) /
                             work_ratio_ * static_cast<double>(request_.batch_size);
  }
  plan.reason = reason(cap);
  return plan;
}

Candidate Planner::candidate(int64_t cap) const {
  Candidate candidate;
  candidate.micro_batch_size = size_under(cap);
  candidate.peak_bytes = predicted_peak(candidate.micro_batch_size);
  candidate.feasible = fits(candidate.micro_batch_size);
  if (const Timings::Timing* timing = known_->timings.of(cap)) {
    const double kept = candidate.feasible ? kept_share(candidate.micro_batch_size) : 0;
    candidate.seconds_per_sample = timing->estimate(kept) / work_ratio_;
  }
  return candidate;
}

std::string Planner::reason(int64_t cap) const {
  std::string text;
  if (request_.whole_batch_only) {
    text = "the samples are coupled: only one micro-batch of all of them is exact";
  } else if (request_.fails_on > 0) {
    text = "the largest that fits, as forward fails on " + std::to_string(request_.fails_on) +
           (request_.fails_on == 1 ? " sample" : " samples");
  } else if (const std::vector<int64_t> caps = candidates(); caps.size() < 2) {
    text = "no larger micro-batch fits";
  } else {
    text = cap == caps.back() && cap < request_.batch_size
               ? "the fastest size that fits, bounded by the budget"
           : stays_whole(size_under(cap))
               ? "the whole batch fits, and splitting it saves less than 3 %"
               : "the fastest of the sizes that fit";
  }
  if (borrowed_) text += "; planned as longer samples are, so that the peak is a bound";
  if (known_->irregular) {
    char margin[96];
    std::snprintf(
        margin, sizeof margin, "; %s, so peaks carry a margin of %.0f %%",
        known_->ragged ? "samples are of unequal length" : "memory depends on the data's values",
        100 * kIrregularMargin);
    text += margin;
  }
  if (!settled()) text += "; not settled yet, more sizes will be timed";
  return text;
}

}  // namespace infinitybatch
