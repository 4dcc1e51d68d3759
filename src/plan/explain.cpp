#include "plan/explain.hpp"

#include "plan/candidates.hpp"
#include "plan/packing.hpp"
#include "plan/prediction.hpp"

#include <algorithm>
#include <cstdio>
#include <string>

namespace infinitybatch::plan {
namespace {

/// Samples of the largest micro-batch.
int64_t largest(const Request& request, int64_t size) {
  if (!request.packing) return size;
  const std::vector<int64_t> sizes = request.split(size);
  return *std::max_element(sizes.begin(), sizes.end());
}

/// Samples as long as those that were timed that take as long as all of them.
double work_of(const Request& request) {
  if (!request.packing) return static_cast<double>(request.batch_size);
  double work = 0;
  for (int64_t row = 0; row < request.batch_size; ++row) work += request.packing->work(row, 1);
  return work;
}

Candidate candidate(const Request& request, const Kinds& kinds, int64_t cap) {
  const Learned& learned = *kinds.learned();
  const Prediction prediction(request, learned);
  Candidate candidate;
  const int64_t size = request.size_under(cap);
  candidate.micro_batch_size = largest(request, size);
  candidate.peak_bytes = prediction.peak(size);
  candidate.feasible = prediction.fits(size);
  if (const Timings::Timing* timing = learned.timings.of(cap)) {
    const double kept = candidate.feasible ? prediction.kept_share(size) : 0;
    candidate.seconds_per_sample = timing->estimate(kept) / kinds.work_ratio();
  }
  return candidate;
}

std::string why(const Request& request, const Candidates& candidates, int64_t cap) {
  if (request.whole_batch_only) {
    return "the samples are coupled: only one micro-batch of all of them is exact";
  }
  if (request.fails_on > 0) {
    return "the largest that fits, as forward fails on " + std::to_string(request.fails_on) +
           (request.fails_on == 1 ? " sample" : " samples");
  }
  if (candidates.caps().size() < 2) return "no larger micro-batch fits";
  if (cap == candidates.caps().back() && cap < request.most()) {
    return "the fastest size that fits, bounded by the budget";
  }
  return candidates.stays_whole(request.size_under(cap))
             ? "the whole batch fits, and splitting it saves less than 3 %"
             : "the fastest of the sizes that fit";
}

/// What makes the prediction another than usual.
std::string reservations(const Kinds& kinds, bool packed) {
  std::string text;
  if (packed) text += "; rows are packed by the bytes that their lengths are predicted to take";
  if (kinds.borrowed()) text += "; planned as longer samples are, so that the peak is a bound";
  if (!kinds.learned()->irregular) return text;
  char margin[96];
  std::snprintf(margin, sizeof margin, "; %s, so peaks carry a margin of %.0f %%",
                kinds.learned()->ragged ? "samples are of unequal length"
                                        : "memory depends on the data's values",
                100 * kIrregularMargin);
  return text + margin;
}

}  // namespace

void explain(Plan& plan, const Request& request, const Kinds& kinds, bool settled) {
  const Learned& learned = *kinds.learned();
  const Prediction prediction(request, learned);
  const Candidates candidates(request, learned);
  const int64_t cap = candidates.fastest();
  const int64_t chosen = request.size_under(cap);
  plan.budget_bytes = request.budget_bytes;
  plan.baseline_bytes = request.baseline_bytes;
  if (!plan.predicted_peak_bytes) plan.predicted_peak_bytes = prediction.peak(chosen);
  for (const int64_t each : candidates.caps()) {
    if (request.packing) plan.candidates.push_back(candidate(request, kinds, each));
  }
  for (int64_t power = 1; !request.packing; power *= 2) {
    // The chosen size stands in its place, whether a power of two or not.
    const bool chosen_next = cap > power / 2 && cap < power;
    if (chosen_next) plan.candidates.push_back(candidate(request, kinds, cap));
    const int64_t each = std::min(power, request.most());
    if (plan.candidates.empty() ||
        plan.candidates.back().micro_batch_size < request.size_under(each)) {
      plan.candidates.push_back(candidate(request, kinds, each));
    }
    if (power >= request.batch_size) break;
  }
  if (const Timings::Timing* timing = candidates.timing_of(cap)) {
    const double kept = prediction.kept_share(chosen, plan.retained_samples());
    plan.predicted_seconds = timing->estimate(kept) / kinds.work_ratio() * work_of(request);
  }
  const bool packed = request.packing && request.length == 0;
  plan.reason = why(request, candidates, cap) + reservations(kinds, packed);
  if (!settled) plan.reason += "; not settled yet, more sizes will be timed";
}

}  // namespace infinitybatch::plan
