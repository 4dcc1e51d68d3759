#include "plan/checkpoint_planner.hpp"

#include "plan/cut_search.hpp"
#include "plan/narrow_places.hpp"

#include <algorithm>
#include <cmath>
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
// Programs whose cuts are remembered: sizes of micro-batches, and ways that forward can take.
constexpr size_t kPrograms = 8;
// After running out of memory: what the estimate is taken to have been short by, at least.
constexpr double kShort = 1.25;
constexpr double kFarShort = 4;
// Larger segments are looked for where there is so much more room, as a share of what there was.
constexpr int64_t kMoreRoom = 16;

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
  smallest_ = known->smallest && (first || smallest_);
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
  plan::CutSearch::Beside beside{offloaded()};
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
  known.smallest = true;  // where there is nothing to cut
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
    if (begin < end) add_cuts(plan::CutSearch(places, begin, end, beside), known);
    begin = end;
  }
}

/// Of one stretch. The stretch that needs the most stands for all.
void CheckpointPlanner::add_cuts(const plan::CutSearch& search, Known& known) const {
  const int64_t sums = search.sums();
  const plan::CutSearch::Choice choice =
      search.choose({situation_.available, correction_, situation_.fixed, may_overlap()});
  known.cuts.insert(known.cuts.end(), choice.ops.begin(), choice.ops.end());
  const auto corrected = [&](int64_t peak) {
    return sums + static_cast<int64_t>(static_cast<double>(peak - sums) * correction_);
  };
  if (corrected(choice.peak) < known.estimate) return;
  known.smallest = choice.smallest || choice.peak <= sums;  // no cut would take less
  known.sums = sums;
  known.estimate = corrected(choice.peak);
  known.overlapped = corrected(choice.overlapped);
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
  // An estimate that is short by more is no guide: the correction grows faster, for few attempts.
  correction_ *= correction_ < kFarShort ? kShort : correction_;
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
