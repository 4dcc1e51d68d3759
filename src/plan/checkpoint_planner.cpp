#include <infinitybatch/plan/checkpoint_planner.hpp>

#include "narrow_places.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace infinitybatch {
namespace {

// Places that are weighed against each other; the work grows with their square.
constexpr size_t kPlaces = 384;
// Bounds on the graph of a segment that are tried, from the whole graph down.
constexpr int kBounds = 40;
// After running out of memory: what the estimate is taken to have been short by, at least.
constexpr double kShort = 1.25;

/// A choice of cuts, as indices into the places.
struct Choice {
  std::vector<size_t> cuts;
  int64_t peak = std::numeric_limits<int64_t>::max();
};

class Search {
 public:
  Search(const plan::NarrowPlaces& places, bool parked)
      : places_(places), ends_(places.positions()), parked_(parked) {}

  int64_t whole() const { return graph(0, ends_.size() - 1); }

  /// The cuts at which the least waits while no segment's graph is above `bound`; nothing where
  /// there are none.
  std::optional<Choice> within(int64_t bound) const {
    constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
    std::vector<int64_t> waits(ends_.size(), kNever);
    std::vector<size_t> before(ends_.size(), 0);
    waits[0] = 0;
    for (size_t j = 1; j < ends_.size(); ++j) {
      for (size_t i = j; i-- > 0;) {
        if (graph(i, j) > bound) break;
        if (waits[i] == kNever) continue;
        const int64_t sum = waits[i] + places_.short_waits(ends_[i]);
        if (sum >= waits[j]) continue;
        waits[j] = sum;
        before[j] = i;
      }
      if (waits[j] == kNever) return std::nullopt;
    }
    Choice choice;
    for (size_t j = ends_.size() - 1; before[j] != 0;) choice.cuts.push_back(j = before[j]);
    std::reverse(choice.cuts.begin(), choice.cuts.end());
    choice.peak = peak(choice.cuts);
    return choice;
  }

  std::vector<uint32_t> ops(const Choice& choice) const {
    std::vector<uint32_t> positions;
    for (const size_t cut : choice.cuts) positions.push_back(ends_[cut]);
    return positions;
  }

 private:
  int64_t graph(size_t i, size_t j) const { return places_.kept(ends_[i], ends_[j]); }

  /// The most in backward: what waits in front of a segment, its graph, the gradient of what it
  /// gives, and two gradients inside of it.
  int64_t peak(const std::vector<size_t>& cuts) const {
    const std::vector<int64_t> arrives = places_.waiting(positions(cuts));
    int64_t waiting = 0;
    int64_t most = 0;
    for (size_t s = 0; s <= cuts.size(); ++s) {
      const size_t begin = s == 0 ? 0 : cuts[s - 1];
      const size_t end = s == cuts.size() ? ends_.size() - 1 : cuts[s];
      if (s > 0) waiting = (parked_ ? 0 : waiting) + arrives[s - 1];
      const int64_t handed = s < cuts.size() ? places_.short_waits(ends_[end]) : 0;
      const int64_t inside = 2 * places_.largest(ends_[begin], ends_[end]);
      most = std::max(most, waiting + handed + graph(begin, end) + inside);
    }
    return most;
  }

  std::vector<uint32_t> positions(const std::vector<size_t>& cuts) const {
    std::vector<uint32_t> all;
    for (const size_t cut : cuts) all.push_back(ends_[cut]);
    return all;
  }

  const plan::NarrowPlaces& places_;
  const std::vector<uint32_t>& ends_;
  bool parked_;
};

}  // namespace

void CheckpointPlanner::begin(int64_t available, bool parked, std::optional<int64_t> fixed) {
  parked = parked || forget;
  chosen_ = false;
  if (available_ != available || parked_ != parked || fixed_ != fixed) {
    changed();
    correction_ = 1.0;
    smallest_ = false;
  }
  available_ = available;
  parked_ = parked;
  fixed_ = fixed;
}

std::vector<uint32_t> CheckpointPlanner::choose(const tape::Tape& tape) {
  chosen_ = true;
  const plan::NarrowPlaces places(tape, kPlaces);
  const Search search(places, parked_);
  const auto whole = static_cast<double>(search.whole());
  Choice best;
  smallest_ = true;
  double least = whole;
  const auto narrowest = static_cast<double>(places.smallest_step());
  for (int step = 0; step < kBounds && least >= narrowest; ++step) {
    least = whole * std::pow(narrowest / whole, static_cast<double>(step) / (kBounds - 1));
    const auto choice = search.within(static_cast<int64_t>(std::ceil(least)));
    if (!choice) break;
    if (fixed_) {
      best = *choice;
      if (static_cast<int64_t>(best.cuts.size()) + 1 >= *fixed_) break;
      continue;
    }
    if (choice->peak < best.peak) best = *choice;
    if (static_cast<double>(best.peak) * correction_ > static_cast<double>(available_)) continue;
    smallest_ = false;
    break;
  }
  estimate_ = static_cast<int64_t>(static_cast<double>(best.peak) * correction_);
  segments_ = static_cast<int64_t>(best.cuts.size()) + 1;
  return search.ops(best);
}

void CheckpointPlanner::begin_forgetting() {
  forget = true;
  changed();
}

bool CheckpointPlanner::ran_out_of_memory() {
  if (smallest_ || fixed_) return false;
  // Forward itself did not fit, and nothing was kept beside it.
  const bool kept = std::any_of(guides.begin(), guides.end(),
                                [](const auto& guide) { return !guide.second.places.empty(); });
  if (!chosen_ && !kept) return false;
  correction_ *= kShort;
  changed();
  return true;
}

void CheckpointPlanner::measured(int64_t bytes) {
  if (estimate_ <= 0) return;
  const double ratio = static_cast<double>(bytes) / static_cast<double>(estimate_);
  // Below 1 the estimate was careful: the next choice may use what was left.
  if (ratio <= 1.0) return;
  correction_ *= ratio;
}

}  // namespace infinitybatch
