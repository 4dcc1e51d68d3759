#include "plan/narrow_places.hpp"

#include "tape/arguments.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace infinitybatch::plan {
namespace {

constexpr uint32_t kNever = UINT32_MAX;

/// From the op that makes a value to the last that uses it.
struct ValueLife {
  uint32_t from = kNever;
  uint32_t to = 0;
};

std::vector<ValueLife> value_lives(const tape::Tape& tape) {
  std::vector<ValueLife> lives(tape.value_count);
  const auto count = static_cast<uint32_t>(tape.ops.size());
  size_t restore = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const tape::Op& op = tape.ops[i];
    if (op.facts == nullptr) {
      lives[tape.restores[restore++].first].to = i;
      continue;
    }
    tape::for_each_argument(tape, op,
                            [&](tape::ValueId value, const tape::Slot&) { lives[value].to = i; });
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const tape::ValueId value = tape.outputs[o];
      if (value != tape::kNoValue && lives[value].from == kNever) lives[value].from = i;
    }
  }
  for (const tape::ValueId value : tape.result_values) {
    if (value != tape::kNoValue) lives[value].to = count;
  }
  // What the model found waits nowhere.
  for (const tape::External& external : tape.externals) lives[external.value].from = kNever;
  return lives;
}

}  // namespace

NarrowPlaces::NarrowPlaces(const tape::Tape& tape, const tape::Costs& costs, size_t most,
                           bool summed, const std::vector<uint32_t>& always, size_t reach) {
  kept_.assign(1, 0);
  for (size_t i = 0; i < tape.ops.size(); ++i) {
    const tape::OpCost cost = i < costs.ops.size() ? costs.ops[i] : tape::OpCost();
    kept_.push_back(kept_.back() + cost.kept);
    own_.push_back(cost.kept);
    workspace_.push_back(cost.rise - cost.kept);
  }
  find_lives(tape, costs);
  find_gradients(tape);
  find_flights(tape);
  forbid(tape);
  pick(most, always);
  reach_ = std::min(reach, positions_.size() - 1);
  play(summed, always);
}

void NarrowPlaces::find_lives(const tape::Tape& tape, const tape::Costs& costs) {
  const std::vector<ValueLife> values = value_lives(tape);
  std::map<uint32_t, Life> memories;
  std::map<uint32_t, bool> found;
  for (const tape::External& external : tape.externals) {
    found[tape.memories[external.value]] = true;
  }
  for (tape::ValueId value = 0; value < values.size(); ++value) {
    const uint32_t memory = tape.memories[value];
    if (values[value].from == kNever || memory == tape::kNoMemory || found.contains(memory)) {
      continue;
    }
    const auto [life, is_new] =
        memories.try_emplace(memory, Life{values[value].from, 0, 0, kNever, memory});
    life->second.from = std::min(life->second.from, values[value].from);
    life->second.to = std::max(life->second.to, values[value].to);
    life->second.bytes = tape.memory_bytes[memory];
  }
  const size_t count = tape.ops.size();
  for (size_t i = 0; i < std::min(count, costs.ops.size()); ++i) {
    for (uint32_t s = costs.ops[i].saves.begin; s < costs.ops[i].saves.end; ++s) {
      const auto life = memories.find(tape.memories[costs.saves[s]]);
      if (life == memories.end()) continue;
      life->second.saved = std::min(life->second.saved, static_cast<uint32_t>(i));
    }
  }
  // Memory that an op made is counted by its life.
  for (const auto& [memory, life] : memories) {
    own_[life.from] = std::max<int64_t>(0, own_[life.from] - life.bytes);
  }
  // What lives for a quarter of the tape waits at whatever is chosen.
  std::vector<int64_t> steps(count + 2, 0);
  for (const auto& [memory, life] : memories) {
    if (life.to <= life.from && life.saved == kNever) continue;
    lives_.push_back(life);
    if (life.to <= life.from) continue;
    if (life.to - life.from > std::max<size_t>(count / 4, 8)) continue;
    steps[life.from + 1] += life.bytes;
    steps[life.to + 1] -= life.bytes;
  }
  waits_.assign(count + 1, 0);
  int64_t waiting = 0;
  for (size_t i = 0; i <= count; ++i) waits_[i] = waiting += steps[i];
}

void NarrowPlaces::find_gradients(const tape::Tape& tape) {
  const std::vector<ValueLife> values = value_lives(tape);
  gradients_.assign(tape.ops.size() + 1, 0);
  for (const tape::External& external : tape.externals) {
    if (!external.tensor.defined() || !external.tensor.requires_grad()) continue;
    gradients_[values[external.value].to] += static_cast<int64_t>(external.tensor.nbytes());
  }
  for (size_t i = tape.ops.size(); i-- > 0;) gradients_[i] += gradients_[i + 1];
}

/// A tensor and a view of it must not wait together where one of them is written afterwards.
void NarrowPlaces::forbid(const tape::Tape& tape) {
  const std::vector<ValueLife> values = value_lives(tape);
  std::map<uint32_t, uint32_t> last_write;
  size_t restore = 0;
  for (uint32_t i = 0; i < tape.ops.size(); ++i) {
    const tape::Op& op = tape.ops[i];
    if (op.facts == nullptr) {
      last_write[tape.memories[tape.restores[restore++].first]] = i;
    } else if (op.facts->writes) {
      tape::for_each_argument(tape, op, [&](tape::ValueId value, const tape::Slot& slot) {
        if (op.facts->written[slot.argument]) last_write[tape.memories[value]] = i;
      });
    }
  }
  last_write.erase(tape::kNoMemory);
  std::map<uint32_t, std::vector<tape::ValueId>> aliases;
  for (tape::ValueId value = 0; value < values.size(); ++value) {
    if (last_write.contains(tape.memories[value])) aliases[tape.memories[value]].push_back(value);
  }
  forbidden_.assign(tape.ops.size() + 1, false);
  for (const auto& [memory, ids] : aliases) {
    if (ids.size() < 2) continue;
    std::map<uint32_t, int> steps;
    for (const tape::ValueId value : ids) {
      const ValueLife life = values[value];
      // A tensor that the model found waits from the beginning.
      const uint32_t from = life.from == kNever ? 0 : life.from + 1;
      if (life.to < from) continue;
      ++steps[from];
      --steps[life.to + 1];
    }
    int waiting = 0;
    for (auto step = steps.begin(); step != steps.end(); ++step) {
      waiting += step->second;
      const auto next = std::next(step);
      if (waiting < 2 || next == steps.end()) continue;
      for (uint32_t p = step->first; p < next->first && p <= last_write.at(memory); ++p) {
        forbidden_[p] = true;
      }
    }
  }
}

/// Of each stretch of equal bytes the place where the least waits.
void NarrowPlaces::pick(size_t most, const std::vector<uint32_t>& always) {
  const auto count = static_cast<uint32_t>(own_.size());
  positions_.push_back(0);
  const int64_t stretch = std::max<int64_t>(1, kept_[count] / static_cast<int64_t>(most));
  uint32_t narrowest = kNever;
  int64_t end = stretch;
  for (uint32_t p = 1; p < count; ++p) {
    if (std::binary_search(always.begin(), always.end(), p)) {
      if (narrowest != kNever) positions_.push_back(narrowest);
      positions_.push_back(p);
      narrowest = kNever;
      end = kept_[p] + stretch;
      continue;
    }
    if (kept_[p] > end && narrowest != kNever) {
      positions_.push_back(narrowest);
      narrowest = kNever;
      end = kept_[p] + stretch;
    }
    if (forbidden_[p]) continue;
    if (narrowest == kNever || waits_[p] <= waits_[narrowest]) narrowest = p;
  }
  if (narrowest != kNever) positions_.push_back(narrowest);
  positions_.push_back(count);
}

/// What an op's backward has beside what is kept: the gradients of all that is used behind it and
/// in front of it, workspace as in forward, and a parameter's gradient before it is added.
void NarrowPlaces::find_flights(const tape::Tape& tape) {
  const size_t count = tape.ops.size();
  std::map<uint32_t, int64_t> made;
  std::vector<int64_t> steps(count + 1, 0);
  for (const auto& life : lives_) {
    if (life.to <= life.from) continue;
    steps[life.from] += life.bytes;
    steps[std::min<size_t>(life.to, count)] -= life.bytes;
    made.emplace(life.memory, life.bytes);
  }
  crossing_.assign(count, 0);
  flights_ = workspace_;
  std::map<uint32_t, int64_t> parameters;
  for (const tape::External& external : tape.externals) {
    if (!external.tensor.defined() || !external.tensor.requires_grad()) continue;
    parameters.emplace(tape.memories[external.value],
                       static_cast<int64_t>(external.tensor.nbytes()));
  }
  int64_t now = 0;
  for (size_t i = 0; i < count; ++i) {
    crossing_[i] = now += steps[i];
    std::set<uint32_t> read;
    tape::for_each_argument(tape, tape.ops[i], [&](tape::ValueId value, const tape::Slot&) {
      read.insert(tape.memories[value]);
    });
    int64_t gradients = 0;
    for (const uint32_t memory : read) {
      for (const auto& bytes : {made, parameters}) {
        if (const auto known = bytes.find(memory); known != bytes.end()) gradients += known->second;
      }
    }
    flights_[i] += crossing_[i] + gradients;
  }
}

/// Forward from each place on, and its backward up to each later place.
void NarrowPlaces::play(bool summed, const std::vector<uint32_t>& always) {
  const size_t places = positions_.size();
  const uint32_t count = positions_.back();
  std::sort(lives_.begin(), lives_.end(),
            [](const Life& a, const Life& b) { return a.from < b.from; });
  at_work_.assign(places * (reach_ + 1), 0);
  std::vector<int64_t> there(count + 2, 0);  // what each op adds to what is alive behind it
  std::vector<int64_t> kept(count + 1, 0);   // and to what backward needs
  std::vector<int64_t> given(count + 2, 0);  // and to what a segment that ends in front of it gives
  for (size_t b = 0; b + 1 < places; ++b) {
    const uint32_t begin = positions_[b];
    const auto behind = std::upper_bound(always.begin(), always.end(), begin);
    const uint32_t first = behind == always.begin() ? 0 : *std::prev(behind);
    std::fill(there.begin() + begin, there.end(), 0);
    std::fill(kept.begin() + begin, kept.end(), 0);
    std::fill(given.begin() + begin, given.end(), 0);
    for (auto life = lives_.rbegin(); life != lives_.rend() && life->from >= begin; ++life) {
      there[life->from] += life->bytes;
      given[life->from + 1] += life->bytes;
      given[life->to + 1] -= life->bytes;
      if (life->saved != kNever) {
        kept[life->saved] += life->bytes;
      } else if (life->to < count) {
        there[life->to + 1] -= life->bytes;
      }
    }
    int64_t alive = 0;
    int64_t saved = 0;
    int64_t forward = 0;
    int64_t backward = 0;
    int64_t earlier = 0;  // backward of all ops but the last
    int64_t gives = 0;
    size_t e = b + 1;
    for (uint32_t op = begin; op < count && e - b <= reach_; ++op) {
      alive += own_[op] + there[op];
      saved += own_[op] + kept[op];
      forward = std::max(forward, alive + workspace_[op]);
      earlier = backward;
      backward = std::max(backward, saved + flights_[op] + gradients_[summed ? first : op]);
      gives += given[op + 1];
      if (op + 1 != positions_[e]) continue;
      const int64_t handed = op + 1 < count ? crossing_[op] : 0;
      // What the segment gives, and its gradient, stand until its backward is over.
      const int64_t roots = op + 1 < count ? 2 * gives : 0;
      at_work_[b * (reach_ + 1) + (e - b)] = std::max(
          {forward + handed + gradients_[summed ? first : op + 1], backward, earlier + roots});
      if (e++ == b + 1) smallest_step_ = std::max(smallest_step_, saved);
    }
  }
}

std::vector<int64_t> NarrowPlaces::waiting(const std::vector<uint32_t>& cuts) const {
  std::vector<int64_t> bytes(cuts.size(), 0);
  for (const Life& life : lives_) {
    const auto first = std::upper_bound(cuts.begin(), cuts.end(), life.from);
    if (first == cuts.end() || *first > life.to) continue;
    bytes[static_cast<size_t>(first - cuts.begin())] += life.bytes;
  }
  return bytes;
}

}  // namespace infinitybatch::plan
