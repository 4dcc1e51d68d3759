#include <infinitybatch/plan/planner.hpp>

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/execute/simulator.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace infinitybatch {
namespace {

// Two sizes whose stories are compared; never 1, which takes other kernels.
constexpr int64_t kSmallProbe = 2;
constexpr int64_t kLargeProbe = 4;
// Below this there are not enough samples for both probes: sizes are tried as they are.
constexpr int64_t kSmallestProfiled = kSmallProbe + kLargeProbe;
// Added to the largest measured peak per sample where memory depends on the data's values.
constexpr double kIrregularMargin = 0.25;
// Sizes this much slower than the fastest are not timed again; larger ones behind two of them never.
constexpr double kSlower = 1.05;
constexpr double kClose = 1.10;
constexpr int kTimings = 2;
constexpr int kCloseTimings = 4;

int64_t even_size(int64_t batch_size, int64_t at_most) {
  const int64_t count = (batch_size + at_most - 1) / at_most;
  return (batch_size + count - 1) / count;
}

}  // namespace

void Planner::begin(const Request& request) {
  const bool same = request.signature == request_.signature &&
                    request.batch_size == request_.batch_size &&
                    request.baseline_bytes == request_.baseline_bytes &&
                    request.budget_bytes == request_.budget_bytes;
  request_ = request;
  known_ = &knowledge_[request.signature];
  row_ = 0;
  if (!same) settled_plan_.reset();
  if (known_->profile && candidate_sizes().empty()) {
    const int64_t needed = std::max(predicted_peak(1), request.budget_bytes + 1);
    throw BudgetExceeded(needed, request.budget_bytes, needed, "a single sample");
  }
}

std::vector<int64_t> Planner::candidate_sizes() const {
  if (known_->whole_batch_only) return {request_.batch_size};
  std::vector<int64_t> sizes;
  const auto consider = [&](int64_t at_most) {
    const int64_t size = even_size(request_.batch_size, at_most);
    if (size <= known_->largest && fits(size) &&
        std::find(sizes.begin(), sizes.end(), size) == sizes.end()) {
      sizes.push_back(size);
    }
  };
  for (int64_t size = kSmallProbe; size < request_.batch_size; size *= 2) consider(size);
  consider(request_.batch_size);
  if (sizes.empty()) {
    consider(1);
  } else if (sizes.back() < request_.batch_size) {
    // The largest that fits lies between this power of two and the next.
    int64_t low = sizes.back();
    int64_t high = std::min({2 * low, request_.batch_size, known_->largest});
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    consider(low);
  }
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

int64_t Planner::predicted_peak(int64_t size) const {
  const int64_t baseline = request_.baseline_bytes;
  double above = 0;
  if (known_->profile) {
    above = static_cast<double>(simulated_peak(size) - baseline);
  } else if (!known_->peaks.empty()) {
    // Activations grow no faster than the samples, so the largest peak per sample is a bound.
    const auto& [measured_size, measured_peak] = *known_->peaks.rbegin();
    const auto exact = known_->peaks.find(size);
    above = exact != known_->peaks.end()
                ? static_cast<double>(exact->second)
                : static_cast<double>(measured_peak) *
                      std::max(1.0, static_cast<double>(size) / static_cast<double>(measured_size));
    if (known_->irregular) above *= 1.0 + kIrregularMargin;
  }
  return baseline + static_cast<int64_t>(std::ceil(above * known_->correction));
}

int64_t Planner::simulated_peak(int64_t size) const {
  const int64_t baseline = request_.baseline_bytes;
  const auto simulate = [&](std::vector<int64_t> sizes) {
    return simulate_peak(stream_plan(std::move(sizes), false), *known_->profile, baseline);
  };
  const int64_t count = (request_.batch_size + size - 1) / size;
  constexpr int64_t kShort = 8;
  if (count <= kShort) return simulate(split_evenly(request_.batch_size, size));
  // From the second micro-batch on all are alike: what one leaves behind (kept outputs), all leave.
  const int64_t largest = even_size(request_.batch_size, size);
  const int64_t shorter = simulate(std::vector<int64_t>(kShort - 1, largest));
  const int64_t longer = simulate(std::vector<int64_t>(kShort, largest));
  return longer + (longer - shorter) * (count - kShort);
}

bool Planner::fits(int64_t size) const {
  return size <= known_->largest && predicted_peak(size) <= request_.budget_bytes;
}

std::optional<int64_t> Planner::probe_size() const {
  const Knowledge& known = *known_;
  if (known.profile || known.irregular || known.whole_batch_only) return std::nullopt;
  if (request_.batch_size < kSmallestProfiled) {
    // Too few for a profile: the whole batch first, then halves.
    return known.peaks.empty() ? std::optional(std::min(request_.batch_size, known.largest))
                               : std::nullopt;
  }
  if (known.traces.empty()) return std::min(kSmallProbe, known.largest);
  if (known.largest < kLargeProbe) return std::nullopt;
  // A third trace replaces the first, in which some kernels ran for the first time.
  return known.traces.size() == 1 ? kLargeProbe : kSmallProbe;
}

bool Planner::promising(int64_t size) const {
  double best = INFINITY;
  int64_t best_size = 0;
  for (const auto& [timed, timing] : known_->timings) {
    if (timing.best_seconds_per_sample < best) {
      best = timing.best_seconds_per_sample;
      best_size = timed;
    }
  }
  const auto found = known_->timings.find(size);
  if (found != known_->timings.end()) {
    return found->second.best_seconds_per_sample <= best * kClose ||
           found->second.count < kTimings;
  }
  int slower = 0;
  for (const auto& [timed, timing] : known_->timings) {
    if (timed > best_size && timed < size && timing.best_seconds_per_sample > best * kSlower) {
      ++slower;
    }
  }
  return slower < 2;
}

bool Planner::wants_timing(int64_t size) const {
  if (!promising(size)) return false;
  const auto found = known_->timings.find(size);
  return found == known_->timings.end() || found->second.count < kCloseTimings;
}

int64_t Planner::fastest() const {
  const std::vector<int64_t> sizes = candidate_sizes();
  int64_t best_size = 0;
  double best = INFINITY;
  for (const int64_t size : sizes) {
    const auto found = known_->timings.find(size);
    if (found != known_->timings.end() && found->second.best_seconds_per_sample < best) {
      best = found->second.best_seconds_per_sample;
      best_size = size;
    }
  }
  if (best_size > 0) return best_size;
  // Nothing timed yet: the largest size that probes have shown to work, else the smallest that fits.
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    if (*size <= kLargeProbe) return *size;
  }
  return sizes.empty() ? 1 : sizes.front();
}

bool Planner::settled() const {
  if (known_ == nullptr || probe_size()) return false;
  const std::vector<int64_t> sizes = candidate_sizes();
  return sizes.size() == 1 ||
         std::none_of(sizes.begin(), sizes.end(), [&](int64_t size) { return wants_timing(size); });
}

std::optional<Piece> Planner::next() {
  const int64_t remaining = request_.batch_size - row_;
  attempted_ = 0;
  if (remaining == 0) return std::nullopt;
  Piece piece;
  std::vector<int64_t> sizes;
  if (row_ == 0 && settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else if (const auto probe = probe_size()) {
    sizes = {std::min(*probe, remaining)};
    piece.trace = sizes.front() >= kSmallProbe && request_.batch_size >= kSmallestProfiled;
  } else if (settled()) {
    sizes = split_evenly(remaining, fastest());
  } else {
    for (const int64_t size : candidate_sizes()) {
      if (size > remaining || !wants_timing(size)) continue;
      sizes = {size};
      piece.time = true;
      break;
    }
    if (sizes.empty()) sizes = split_evenly(remaining, std::min(fastest(), remaining));
  }
  if (!sizes.empty()) {
    const bool last = std::accumulate(sizes.begin(), sizes.end(), row_) == request_.batch_size;
    piece.plan = stream_plan(std::move(sizes), last && request_.penalty);
    if (!last) piece.plan.instructions.pop_back();  // handed out once, at the end
    if (row_ == 0 && last && settled()) {
      piece.plan.predicted_peak_bytes = predicted_peak(piece.plan.micro_batch_size());
      settled_plan_ = piece.plan;
    }
  }
  row_ += piece.plan.batch_size;
  attempted_ = piece.plan.micro_batch_size();
  return piece;
}

void Planner::observe(const Piece& piece, const Measurement& measured) {
  if (piece.settled) return;
  const int64_t size = piece.plan.micro_batch_size();
  const int64_t above = measured.peak_bytes - request_.baseline_bytes;
  int64_t& peak = known_->peaks[size];
  peak = std::max(peak, above);
  if (known_->profile) {
    const bool begun = row_ > piece.plan.batch_size;
    const int64_t predicted =
        simulate_peak(piece.plan, *known_->profile, request_.baseline_bytes, begun) -
        request_.baseline_bytes;
    if (predicted > 0) {
      known_->correction = std::max(
          known_->correction, static_cast<double>(above) / static_cast<double>(predicted));
    }
  }
  if (piece.time) {
    const double per_sample = measured.seconds / static_cast<double>(piece.plan.batch_size);
    Timing& timing = known_->timings[size];
    timing.best_seconds_per_sample =
        timing.count == 0 ? per_sample : std::min(timing.best_seconds_per_sample, per_sample);
    ++timing.count;
  }
  if (measured.trace) learn(*measured.trace);
}

void Planner::learn(MicroBatchTrace trace) {
  std::vector<MicroBatchTrace>& traces = known_->traces;
  traces.push_back(std::move(trace));
  if (traces.size() < 2) return;
  known_->profile = MicroBatchProfile::fit(traces[traces.size() - 2], traces.back());
  known_->irregular = !known_->profile && traces.size() > 2;
  if (known_->profile || known_->irregular) traces.clear();
}

void Planner::ran_out_of_memory(int64_t needed_bytes) {
  settled_plan_.reset();
  if (attempted_ == 0) {
    throw BudgetExceeded(std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes,
                         std::nullopt, "what the step holds before its first micro-batch");
  }
  if (known_->whole_batch_only || attempted_ <= 1) {
    throw BudgetExceeded(std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes,
                         std::nullopt,
                         known_->whole_batch_only
                             ? "one micro-batch of all " + std::to_string(request_.batch_size) +
                                   " samples (they are coupled)"
                             : "a single sample");
  }
  known_->largest = std::min(known_->largest, attempted_ - 1);
  attempted_ = 0;
  if (!known_->profile) known_->traces.clear();
}

bool Planner::try_whole_batch() {
  if (known_->whole_batch_only) return false;
  known_->whole_batch_only = true;
  return true;
}

Plan Planner::plan() const {
  if (settled_plan_) return describe(*settled_plan_);
  return describe(stream_plan(split_evenly(request_.batch_size, fastest()), request_.penalty));
}

Plan Planner::describe(Plan plan) const {
  const int64_t size = plan.micro_batch_size();
  plan.budget_bytes = request_.budget_bytes;
  plan.baseline_bytes = request_.baseline_bytes;
  plan.predicted_peak_bytes = predicted_peak(size);
  for (int64_t at_most = 1; at_most < 2 * request_.batch_size; at_most *= 2) {
    const int64_t candidate = even_size(request_.batch_size, std::min(at_most, request_.batch_size));
    if (!plan.candidates.empty() && plan.candidates.back().micro_batch_size >= candidate) continue;
    plan.candidates.push_back(candidate_of(candidate));
  }
  const auto place = std::lower_bound(
      plan.candidates.begin(), plan.candidates.end(), size,
      [](const Candidate& candidate, int64_t value) { return candidate.micro_batch_size < value; });
  if (place == plan.candidates.end() || place->micro_batch_size != size) {
    plan.candidates.insert(place, candidate_of(size));
  }
  if (const auto timing = known_->timings.find(size); timing != known_->timings.end()) {
    plan.predicted_seconds =
        timing->second.best_seconds_per_sample * static_cast<double>(request_.batch_size);
  }
  plan.reason = reason(size);
  return plan;
}

Candidate Planner::candidate_of(int64_t size) const {
  Candidate candidate;
  candidate.micro_batch_size = size;
  candidate.peak_bytes = predicted_peak(size);
  candidate.feasible = fits(size);
  if (const auto timing = known_->timings.find(size); timing != known_->timings.end()) {
    candidate.seconds_per_sample = timing->second.best_seconds_per_sample;
  }
  return candidate;
}

std::string Planner::reason(int64_t size) const {
  std::string text;
  if (known_->whole_batch_only) {
    text = "the samples are coupled: only one micro-batch of all of them is exact";
  } else if (const std::vector<int64_t> sizes = candidate_sizes(); sizes.size() < 2) {
    text = "no larger micro-batch fits";
  } else {
    text = size == sizes.back() && size < request_.batch_size
               ? "the fastest size that fits, bounded by the budget"
               : "the fastest of the sizes that fit";
  }
  if (known_->irregular) {
    char margin[96];
    std::snprintf(margin, sizeof margin,
                  "; memory depends on the data's values, so peaks carry a margin of %.0f %%",
                  100 * kIrregularMargin);
    text += margin;
  }
  if (!settled()) text += "; not settled yet, more sizes will be timed";
  return text;
}

}  // namespace infinitybatch
