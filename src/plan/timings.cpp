#include "plan/timings.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace infinitybatch {
namespace {

// Sizes behind two that are this much slower than the fastest are not timed: larger ones, and in
// rehearsals smaller ones.
constexpr double kSlower = 1.05;
// A rehearsed size that is as slow as this says so at once, and that smaller ones are slower yet:
// where launching kernels is what takes time, half the size takes as long.
constexpr double kFarSlower = 1.5;

/// When a size has been timed enough: after `least` micro-batches, and either `seconds` of work or
/// `most` micro-batches, whichever comes first. Long ones need not be more than `kFewLong`.
struct Enough {
  int least;
  int most;
  double seconds;
};
constexpr int kFewLong = 4;
constexpr double kLongSeconds = 0.5;
constexpr int kFewRehearsed = 2;
constexpr double kRehearsedSeconds = 0.1;
// One micro-batch of a few milliseconds says nothing on a machine that does other work as well.
constexpr Enough kEnough{6, 8, 0.020};
// More for sizes that may yet turn out to be the fastest: a few disturbed timings make one look
// twice as slow as it is.
constexpr double kClose = 2.5;
constexpr Enough kEnoughClose{8, 16, 0.080};
// What stands for all timings of a size: the best of up to 8, the second best of up to 16.
constexpr int kLowPart = 8;
// Work in one piece, about. Many pieces are better than a long one: a disturbance lasts.
constexpr double kPieceSeconds = 0.010;
// A first micro-batch of a size pays for kernels that are prepared and memory that is new. Where a
// step has rows for one only, this many are dropped; then they count.
constexpr int kColdSingles = 2;
constexpr int kColdRehearsed = 1;

}  // namespace

double Timings::Timing::estimate(double kept) const {
  const auto typical = [this](std::vector<double> values) {
    if (average) {
      const double all = std::accumulate(values.begin(), values.end(), 0.0);
      return all / static_cast<double>(values.size());
    }
    const auto low = values.begin() + (static_cast<std::ptrdiff_t>(values.size()) - 1) / kLowPart;
    std::nth_element(values.begin(), low, values.end());
    return *low;
  };
  const bool known = !average && !later_per_sample.empty();
  const double all = typical(known ? later_per_sample : seconds_per_sample);
  if (kept <= 0 || again_per_sample.empty()) return all;
  return all - kept * std::min(typical(again_per_sample), all);
}

const Timings::Timing* Timings::of(int64_t cap) const {
  const auto found = by_cap_.find(cap);
  if (found == by_cap_.end() || found->second.seconds_per_sample.empty()) return nullptr;
  return &found->second;
}

int Timings::pieces(int64_t cap) const {
  const auto found = by_cap_.find(cap);
  return found == by_cap_.end() ? 0 : found->second.pieces;
}

double Timings::part_that_pays(int64_t size) const {
  if (by_cap_.empty()) return INFINITY;
  auto here = by_cap_.lower_bound(size);
  if (here == by_cap_.end()) --here;
  const Timing& these = here->second;
  // The difference of two that are close tells nothing.
  const auto is_close = [&](const Timing& other) { return 3 * other.size > 2 * these.size; };
  while (here != by_cap_.begin() && is_close(here->second)) --here;
  const Timing& fewer = here->second;
  if (is_close(fewer) || fewer.seconds_per_sample.empty() || these.again_per_sample.empty()) {
    return INFINITY;
  }
  // A sample takes a + b / size seconds, where b is what a micro-batch takes beside its samples.
  const double b_of_one =
      std::max(0.0, fewer.estimate() - these.estimate()) * fewer.size / (these.size - fewer.size);
  const double again = these.estimate() - these.estimate(/*kept=*/1);
  return again > 0 ? b_of_one / again : INFINITY;
}

bool Timings::wants(int64_t cap, bool rehearsed) const {
  double best = INFINITY;
  int64_t best_cap = 0;
  for (const auto& [timed, timing] : by_cap_) {
    if (timing.seconds_per_sample.empty()) continue;
    if (const double estimate = timing.estimate(); estimate < best) {
      best = estimate;
      best_cap = timed;
    }
  }
  const auto far = [&](const Timing& timing) {
    return rehearsed && timing.estimate() > best * kFarSlower;
  };
  const auto enough = [&](const Timing& timing, const Enough& rule) {
    const auto count = static_cast<int>(timing.seconds_per_sample.size());
    if (rehearsed && count >= kFewRehearsed && timing.seconds >= kRehearsedSeconds) return true;
    if (count >= kFewLong && timing.seconds >= kLongSeconds) return true;
    if (far(timing)) return true;
    return count >= rule.least && (timing.seconds >= rule.seconds || count >= rule.most);
  };
  if (const Timing* timing = of(cap)) {
    const bool close = timing->estimate() <= best * kClose;
    return !enough(*timing, close ? kEnoughClose : kEnough);
  }
  int larger = 0, smaller = 0;
  for (const auto& [timed, timing] : by_cap_) {
    if (timing.seconds_per_sample.empty() || !enough(timing, kEnough)) continue;
    if (timing.estimate() <= best * kSlower) continue;
    if (timed > best_cap && timed < cap) ++larger;
    if (timed < best_cap && timed > cap) smaller += far(timing) ? 2 : 1;
  }
  return larger < 2 && !(rehearsed && smaller >= 2);
}

int64_t Timings::count(int64_t cap, int64_t size, bool first) const {
  // A size that was not timed yet is taken to be as fast as the next smaller one.
  const Timing* like = nullptr;
  for (const auto& [timed, timing] : by_cap_) {
    if (timed <= cap && !timing.seconds_per_sample.empty()) like = &timing;
  }
  int64_t count = kEnough.least;
  if (like != nullptr) {
    const double each = like->estimate() * static_cast<double>(size);
    const double wanted = std::ceil(kPieceSeconds / std::max(each, 1e-9));
    count = static_cast<int64_t>(std::min(wanted, static_cast<double>(kEnoughClose.most)));
  }
  return count + (first ? 1 : 0);
}

void Timings::tell_in_parts(int64_t parts) {
  std::map<int64_t, Timing> by_cap;
  for (auto& [cap, timing] : by_cap_) by_cap[cap * parts] = std::move(timing);
  by_cap_ = std::move(by_cap);
}

void Timings::learn(int64_t cap, const Piece& piece) {
  Timing& timing = by_cap_[cap];
  ++timing.pieces;
  timing.average = piece.average;
  size_t counted = 0;
  if (piece.first) {
    if (piece.seconds.size() > 1) {
      counted = 1;
    } else if (timing.cold < (piece.rehearsed ? kColdRehearsed : kColdSingles)) {
      ++timing.cold;
      return;
    }
  }
  for (size_t i = counted; i < piece.seconds.size(); ++i) {
    const double size = piece.work != nullptr ? (*piece.work)[i] : static_cast<double>(piece.size);
    timing.size = std::max(timing.size, size);
    timing.seconds_per_sample.push_back(piece.seconds[i] / size * piece.scale);
    if (i > 0 || !piece.begins) {
      timing.later_per_sample.push_back(timing.seconds_per_sample.back());
    }
    timing.seconds += piece.seconds[i];
    if (i < piece.again.size()) {
      timing.again_per_sample.push_back(piece.again[i] / size * piece.scale);
    }
  }
}

}  // namespace infinitybatch
