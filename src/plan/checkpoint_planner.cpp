#include "plan/checkpoint_planner.hpp"

#include "plan/narrow_places.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace infinitybatch {
namespace {

// Places that are weighed against each other; the work grows with their square. Where what lies
// between two of so many is too much, all ops are places, each with those behind it that make as
// many pairs.
constexpr size_t kPlaces = 384;
// Ops that keep less than this share of an average op's bytes are no place by themselves.
constexpr size_t kFinest = 4;
// Bounds on the graph of a segment that are tried, from the whole graph down.
constexpr int kBounds = 40;
// Between the least bound that was kept and the largest that was not.
constexpr int kHalvings = 8;
// Programs whose cuts are remembered: sizes of micro-batches, and ways that forward can take.
constexpr size_t kPrograms = 8;
// After running out of memory: what the estimate is taken to have been short by, at least.
constexpr double kShort = 1.25;
// Larger segments are looked for where there is so much more room, as a share of what there was.
constexpr int64_t kMoreRoom = 16;

/// A choice of cuts, as indices into the places.
struct Choice {
  std::vector<size_t> cuts;
  int64_t peak = 0;
  int64_t overlapped = 0;  ///< the same, with the next frontier on its way
};

/// Of what the model returned.
int64_t result_bytes(const tape::Tape& tape) {
  std::set<uint32_t> memories;
  for (const tape::ValueId value : tape.result_values) {
    if (value != tape::kNoValue) memories.insert(tape.memories[value]);
  }
  memories.erase(tape::kNoMemory);
  int64_t bytes = 0;
  for (const uint32_t memory : memories) bytes += tape.memory_bytes[memory];
  return bytes;
}

}  // namespace

/// Cuts of one stretch of a tape.
class CheckpointPlanner::Search {
 public:
  struct Beside {
    bool offloaded = false;  // what waits leaves the device
    int64_t others = 0;      // micro-batches at all of whose cuts something waits
    int64_t elsewhere = 0;   // bytes that are there all the while
  };
  /// \param begin, end of the stretch, as indices into the places
  Search(const plan::NarrowPlaces& places, size_t begin, size_t end, const Beside& beside)
      : places_(places),
        begin_(begin),
        ends_(places.positions().begin() + static_cast<std::ptrdiff_t>(begin),
              places.positions().begin() + static_cast<std::ptrdiff_t>(end) + 1),
        beside_(beside) {}

  /// Without cuts; more than any budget where no segment may be as long.
  int64_t whole() const { return peak({}, /*overlapped=*/false); }
  /// A bound that tells no segment from any other.
  int64_t loosest() const {
    const size_t end = ends_.size() - 1;
    if (end <= places_.reach()) return whole();
    int64_t most = 0;
    for (size_t i = 0; i < end; ++i) {
      most = std::max(most, at_work(i, std::min(end, i + places_.reach())));
    }
    return most;
  }
  /// Of the gradients' sums and what is elsewhere, which no choice can do without.
  int64_t sums() const { return places_.gradients(ends_[0]) + beside_.elsewhere; }

  /// No segment can keep less.
  int64_t smallest_step() const { return places_.smallest_step(); }

  /// Cuts with which no segment needs more than `bound`; nothing where there are none. Every
  /// segment but the last is computed exactly once more, so the longest last segment takes the
  /// least time, whatever the ops cost; in front of it the least waits. Where the cuts of other
  /// micro-batches hold something too, the least waits altogether.
  std::optional<Choice> within(int64_t bound) const {
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
    Choice choice;
    for (size_t j = end; before[j] != 0;) choice.cuts.push_back(j = before[j]);
    std::reverse(choice.cuts.begin(), choice.cuts.end());
    choice.peak = peak(choice.cuts, /*overlapped=*/false);
    choice.overlapped = peak(choice.cuts, beside_.offloaded);
    return choice;
  }

  std::vector<uint32_t> ops(const Choice& choice) const {
    std::vector<uint32_t> positions;
    for (const size_t cut : choice.cuts) positions.push_back(ends_[cut]);
    return positions;
  }

 private:
  int64_t at_work(size_t i, size_t j) const {
    return places_.at_work(begin_ + i, begin_ + j) + beside_.elsewhere;
  }

  /// What waits in front of a segment, and what it takes while it is at work.
  int64_t peak(const std::vector<size_t>& cuts, bool overlapped) const {
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

  const plan::NarrowPlaces& places_;
  size_t begin_;
  std::vector<uint32_t> ends_;
  Beside beside_;
};

void CheckpointPlanner::begin(const Situation& situation) {
  chosen_ = false;
  searched_ = false;
  Situation before = std::exchange(situation_, situation);
  before.available = situation.available;
  const bool more_room = situation.available - room_ > room_ / kMoreRoom;
  if (before != situation) {
    start_afresh();
  } else if (more_room) {
    // What live memory leaves rises and falls. What was learned holds at any room.
    start_over();
    smallest_ = false;
  }
  guides_ = guides;
  if (situation.fixed) return;
  for (Known& known : known_) {
    known.stale = known.stale || (known.estimate > situation.available && !known.smallest);
  }
}

CheckpointPlanner::Known CheckpointPlanner::Known::of(const tape::Tape& tape) {
  Known known;
  for (const tape::Op& op : tape.ops) known.ops.push_back(op.facts);
  for (const tape::Slot& slot : tape.slots) known.slots.push_back(slot.first);
  known.elements = tape.elements;
  known.outputs = tape.outputs;
  return known;
}

bool CheckpointPlanner::Known::is_program_of(const Known& other) const {
  return ops == other.ops && slots == other.slots && elements == other.elements &&
         outputs == other.outputs;
}

std::vector<uint32_t> CheckpointPlanner::choose(const tape::Tape& tape,
                                                const std::vector<uint32_t>& ops) {
  const bool first = !std::exchange(chosen_, true);
  Known here = Known::of(tape);
  auto known = std::find_if(known_.begin(), known_.end(),
                            [&](const Known& each) { return each.is_program_of(here); });
  if (known == known_.end()) {
    if (known_.size() == kPrograms) known_.pop_front();
    known = known_.insert(known_.end(), std::move(here));
    known->guessed = true;
    known->stale = true;
  }
  if (known->guessed) {
    if (!guessed || known->costs.ops.empty()) known->costs = tape.costs;
    known->stale = known->stale || !guessed;
    known->guessed = guessed;
  }
  guessed = known->guessed;
  if (std::exchange(known->stale, false)) {
    search(tape, ops, *known);
    searched_ = true;
    room_ = situation_.available;
    went_.reset();
  }
  smallest_ = known->smallest;
  // With a coupled loss the next micro-batch begins where this one ends: its frontier is fetched in
  // turn.
  overlaps_ = may_overlap() && known->overlapped <= situation_.available;
  // Micro-batches of other programs may have needed more.
  const int64_t estimate = overlaps_ ? known->overlapped : known->estimate;
  if (first || estimate > estimate_) {
    estimate_ = estimate;
    sums_ = known->sums;
  }
  segments_ = static_cast<int64_t>(known->cuts.size() + ops.size()) + 1;
  return known->cuts;
}

void CheckpointPlanner::search(const tape::Tape& tape, const std::vector<uint32_t>& ops,
                               Known& known) const {
  const bool summed = situation_.micro_batches > 1;
  const size_t count = tape.ops.size();
  search(tape, ops, plan::NarrowPlaces(tape, known.costs, kPlaces, summed, ops), known);
  if (situation_.fixed || !known.smallest || count <= kPlaces) return;
  const size_t reach = std::max<size_t>(2, kPlaces * kPlaces / count);
  Known finer = known;
  search(tape, ops, plan::NarrowPlaces(tape, known.costs, kFinest * count, summed, ops, reach),
         finer);
  if (finer.estimate < known.estimate) known = std::move(finer);
}

void CheckpointPlanner::search(const tape::Tape& tape, const std::vector<uint32_t>& ops,
                               const plan::NarrowPlaces& places, Known& known) const {
  const std::vector<uint32_t>& positions = places.positions();
  Search::Beside beside{offloaded()};
  const int64_t others = situation_.micro_batches - 1;
  int64_t outputs = 0;  // of all, and their gradient
  if (situation_.coupled) {
    if (!again && !situation_.together) beside.others = others;
    outputs = 2 * situation_.micro_batches * result_bytes(tape);
  }
  const std::vector<int64_t> arrives = places.waiting(ops);
  int64_t waiting = 0;  // of one micro-batch, in front of ops of the whole batch until here
  size_t begin = 0;
  known.cuts.clear();
  known.estimate = 0;
  known.smallest = false;
  for (size_t stretch = 0; stretch <= ops.size(); ++stretch) {
    const uint32_t last = stretch < ops.size() ? ops[stretch] : positions.back();
    size_t end = begin;
    while (positions[end] < last) ++end;
    if (stretch > 0) waiting += arrives[stretch - 1];
    beside.elsewhere = outputs;
    if (!offloaded()) {
      // Of the others their gradients behind this stretch, too.
      const int64_t handed = stretch < ops.size() ? arrives[stretch] : 0;
      const int64_t own = places.waiting({positions[begin]}).front();
      beside.elsewhere += others * (waiting + handed) + std::max<int64_t>(0, waiting - own);
    }
    if (begin < end) search(Search(places, begin, end, beside), known);
    begin = end;
  }
}

/// Adds the cuts of one stretch. The stretch that needs the most stands for all.
void CheckpointPlanner::search(const Search& search, Known& known) const {
  // What no choice can do without is known exactly; the estimate is of the rest.
  const auto sums = static_cast<double>(search.sums());
  const double whole = static_cast<double>(search.whole()) - sums;
  const double loosest = static_cast<double>(search.loosest()) - sums;
  const double room = (static_cast<double>(situation_.available) - sums) / correction_;
  const double narrowest = std::min(static_cast<double>(search.smallest_step()), loosest);
  const std::optional<int64_t>& fixed = situation_.fixed;
  Choice best{{}, search.whole(), search.whole()};
  bool smallest = whole > 0 && (fixed || whole > room);
  const auto weigh = [&](double above) {
    const auto choice = search.within(static_cast<int64_t>(std::ceil(sums + above)));
    if (!choice) return false;
    if (fixed) {
      best = *choice;
      return static_cast<int64_t>(best.cuts.size()) + 1 < *fixed;
    }
    if (choice->peak < best.peak) best = *choice;
    smallest = static_cast<double>(best.peak) - sums > room;
    return smallest;
  };
  if (!fixed && room > 0 && smallest) weigh(room);
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
    for (int step = 0; step < kHalvings && !fixed && smallest; ++step) {
      const double next = (above + too_small) / 2.0;
      (weigh(next) || !smallest ? above : too_small) = next;
    }
  }
  const int64_t coming = best.overlapped - best.peak;
  if (may_overlap() && !fixed && coming > 0) {
    // Room for a frontier on its way, where smaller segments give it.
    const double less = room - static_cast<double>(coming);
    const auto choice = search.within(static_cast<int64_t>(std::ceil(sums + less)));
    if (choice && static_cast<double>(choice->overlapped) - sums <= room) best = *choice;
  }
  const auto corrected = [&](int64_t peak) {
    return search.sums() + static_cast<int64_t>((static_cast<double>(peak) - sums) * correction_);
  };
  const std::vector<uint32_t> cuts = search.ops(best);
  known.cuts.insert(known.cuts.end(), cuts.begin(), cuts.end());
  if (corrected(best.peak) < known.estimate) return;
  known.smallest = smallest;
  known.sums = search.sums();
  known.estimate = corrected(best.peak);
  known.overlapped = corrected(best.overlapped);
}

void CheckpointPlanner::start_over() {
  changed();
  known_.clear();
  went_.reset();
  room_ = situation_.available;
}

void CheckpointPlanner::start_afresh() {
  start_over();
  correction_ = 1.0;
  smallest_ = false;
  in_turn_ = false;
}

void CheckpointPlanner::begin_again() {
  again = true;
  start_over();
  correction_ = 1.0;
}

void CheckpointPlanner::begin_forgetting() {
  forget = true;
  start_afresh();
}

bool CheckpointPlanner::ran_out_of_memory() {
  if (chosen_ && overlaps_) {
    in_turn_ = true;
    overlaps_ = false;
    start_over();
    return true;
  }
  if (smallest_ || situation_.fixed) return false;
  // Forward itself did not fit, and nothing was kept beside it.
  const bool kept = std::any_of(guides.begin(), guides.end(),
                                [](const auto& guide) { return !guide.second.places.empty(); });
  if (!chosen_ && !kept) return false;
  correction_ *= kShort;
  start_over();
  return true;
}

int64_t CheckpointPlanner::estimate() const {
  return !searched_ && went_ && went_->guides == guides_ ? went_->bytes : estimate_;
}

void CheckpointPlanner::measured(int64_t bytes) {
  if (!searched_) went_ = Went{guides_, bytes};
  if (estimate_ <= sums_) return;
  const double ratio = static_cast<double>(bytes - sums_) / static_cast<double>(estimate_ - sums_);
  // Below 1 the estimate was careful. Another choice would have another error, so it stays, as one
  // does that had the room all the same.
  if (ratio <= 1.0) return;
  correction_ *= ratio;
  const auto corrected = [&](int64_t estimate, int64_t sums) {
    return sums + static_cast<int64_t>(std::ceil(static_cast<double>(estimate - sums) * ratio));
  };
  for (Known& known : known_) {
    known.stale = known.stale || (bytes > situation_.available && !situation_.fixed);
    known.estimate =
        std::min(corrected(known.estimate, known.sums), std::max(bytes, situation_.available));
    known.overlapped = corrected(known.overlapped, known.sums);
  }
}

}  // namespace infinitybatch
