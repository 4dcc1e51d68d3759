#include "plan/cut_search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace infinitybatch::plan {
namespace {

// Bounds on the graph of a segment that are tried, from the whole graph down.
constexpr int kBounds = 40;
// Between the least bound that was kept and the largest that was not.
constexpr int kHalvings = 8;

}  // namespace

CutSearch::CutSearch(const NarrowPlaces& places, size_t begin, size_t end, const Beside& beside)
    : places_(places),
      begin_(begin),
      ends_(places.positions().begin() + static_cast<std::ptrdiff_t>(begin),
            places.positions().begin() + static_cast<std::ptrdiff_t>(end) + 1),
      beside_(beside) {}

CutSearch::Choice CutSearch::choose(const Room& given) const {
  const auto sums = static_cast<double>(this->sums());
  Cuts best{{}, peak({}, /*overlapped=*/false), 0};
  best.overlapped = best.peak;
  const double whole = static_cast<double>(best.peak) - sums;
  const double loosest = static_cast<double>(this->loosest(best.peak)) - sums;
  const double room = (static_cast<double>(given.available) - sums) / given.correction;
  const double narrowest = std::min(static_cast<double>(places_.smallest_step()), loosest);
  bool smallest = whole > 0 && (given.fixed || whole > room);
  const auto weigh = [&](double above) {
    const auto cuts = within(static_cast<int64_t>(std::ceil(sums + above)));
    if (!cuts) return false;
    if (given.fixed) {
      best = *cuts;
      return std::ssize(best.places) + 1 < *given.fixed;
    }
    if (cuts->peak < best.peak) best = *cuts;
    smallest = static_cast<double>(best.peak) - sums > room;
    return smallest;
  };
  if (!given.fixed && room > 0 && smallest) weigh(room);
  if (smallest) {
    double above = loosest;
    double too_small = 0;
    bool going_on = true;
    for (int step = 0; step < kBounds && going_on; ++step) {
      const double next =
          loosest * std::pow(narrowest / loosest, static_cast<double>(step) / (kBounds - 1));
      going_on = weigh(next);
      if (going_on) above = next;
      if (!going_on && smallest) too_small = next;
    }
    // The least bound that any cuts keep, where none of these is inside the budget.
    for (int step = 0; step < kHalvings && !given.fixed && smallest; ++step) {
      const double next = (above + too_small) / 2.0;
      (weigh(next) || !smallest ? above : too_small) = next;
    }
  }
  const int64_t coming = best.overlapped - best.peak;
  if (given.overlaps && !given.fixed && coming > 0) {
    // Room for a frontier on its way, where smaller segments give it.
    const double less = room - static_cast<double>(coming);
    const auto cuts = within(static_cast<int64_t>(std::ceil(sums + less)));
    if (cuts && static_cast<double>(cuts->overlapped) - sums <= room) best = *cuts;
  }
  Choice choice{{}, best.peak, best.overlapped, smallest};
  for (const size_t place : best.places) choice.ops.push_back(ends_[place]);
  return choice;
}

/// A bound that tells no segment from any other.
int64_t CutSearch::loosest(int64_t whole) const {
  const size_t end = ends_.size() - 1;
  if (end <= places_.reach()) return whole;
  int64_t most = 0;
  for (size_t i = 0; i < end; ++i) {
    most = std::max(most, at_work(i, std::min(end, i + places_.reach())));
  }
  return most;
}

/// Cuts with which no segment needs more than `bound`; nothing where there are none. Every
/// segment but the last is computed exactly once more, so the longest last segment takes the
/// least time, whatever the ops cost; in front of it the least waits. Where the cuts of other
/// micro-batches hold something too, the least waits altogether.
std::optional<CutSearch::Cuts> CutSearch::within(int64_t bound) const {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const size_t end = ends_.size() - 1;
  std::vector<int64_t> waits(ends_.size(), kNever);
  std::vector<size_t> before(ends_.size(), 0);
  waits[0] = 0;
  for (size_t j = 1; j < ends_.size(); ++j) {
    for (size_t i = j; i-- > 0;) {
      const int64_t own = at_work(i, j);
      if (own > bound) break;
      if (waits[i] == kNever) continue;
      const int64_t arrives = places_.short_waits(ends_[i]);
      const int64_t sum = waits[i] + arrives;
      if (own + (beside_.offloaded ? arrives : sum) > bound) continue;
      const bool longest = j == end && beside_.others == 0;
      if (sum > waits[j] && !longest) continue;
      waits[j] = sum;
      before[j] = i;
    }
    if (waits[j] == kNever) return std::nullopt;
  }
  Cuts cuts;
  for (size_t j = end; before[j] != 0;) cuts.places.push_back(j = before[j]);
  std::reverse(cuts.places.begin(), cuts.places.end());
  cuts.peak = peak(cuts.places, /*overlapped=*/false);
  cuts.overlapped = peak(cuts.places, beside_.offloaded);
  return cuts;
}

/// What waits in front of a segment, and what it takes while it is at work.
int64_t CutSearch::peak(const std::vector<size_t>& cuts, bool overlapped) const {
  std::vector<uint32_t> positions{ends_[0]};
  for (const size_t cut : cuts) positions.push_back(ends_[cut]);
  const std::vector<int64_t> arrives = places_.waiting(positions);  // in front of each segment
  int64_t waiting = 0;
  const int64_t elsewhere =
      beside_.others * std::accumulate(arrives.begin(), arrives.end(), int64_t{0});
  int64_t most = 0;
  for (size_t s = 0; s <= cuts.size(); ++s) {
    const size_t begin = s == 0 ? 0 : cuts[s - 1];
    const size_t end = s == cuts.size() ? ends_.size() - 1 : cuts[s];
    waiting = (beside_.offloaded ? 0 : waiting) + arrives[s];
    const int64_t coming = overlapped && s > 1 ? arrives[s - 1] : 0;
    most = std::max(most, waiting + coming + at_work(begin, end));
  }
  return most + (beside_.offloaded ? 0 : elsewhere);
}

}  // namespace infinitybatch::plan
