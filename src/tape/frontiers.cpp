#include "tape/frontiers.hpp"

#include "tape/arguments.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::tape {
namespace {

/// For each memory, the position of the last op that writes it; -1 where none does.
std::vector<int64_t> last_writes(const Tape& tape) {
  std::vector<int64_t> last(tape.memory_bytes.size(), -1);
  const auto write = [&](ValueId value, size_t op) {
    if (tape.memories[value] != kNoMemory) last[tape.memories[value]] = static_cast<int64_t>(op);
  };
  size_t restore = 0;
  for (size_t i = 0; i < tape.ops.size(); ++i) {
    const Op& op = tape.ops[i];
    if (op.facts == nullptr) {
      write(tape.restores[restore++].first, i);
      continue;
    }
    if (!op.facts->writes) continue;
    for_each_argument(tape, op, [&](ValueId value, const Slot& slot) {
      if (op.facts->written[slot.argument]) write(value, i);
    });
  }
  return last;
}

}  // namespace

FrontierGuide guide_of(const Tape& tape, const std::vector<Segment>& segments,
                       Fingerprints program) {
  const std::vector<int64_t> writes = last_writes(tape);
  FrontierGuide guide;
  guide.program = std::move(program);
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    const uint32_t end = segments[s].ops.end;
    FrontierGuide::Place place{tape.origins[end], {}, segments[s + 1].draws};
    for (const ValueId value : segments[s].gives) {
      const uint32_t memory = tape.memories[value];
      const bool changed = memory != kNoMemory && writes[memory] >= static_cast<int64_t>(end);
      place.gives.push_back({value, changed});
    }
    guide.places.push_back(std::move(place));
  }
  guide.last = segments.back().takes;
  return guide;
}

bool Frontiers::complete(const std::vector<Segment>& segments) const {
  if (random.size() + 1 != segments.size()) return false;
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    const bool all = std::all_of(
        segments[s].gives.begin(), segments[s].gives.end(),
        [&](ValueId value) { return waiting.contains({value, static_cast<int32_t>(s)}); });
    if (!all) return false;
  }
  return true;
}

}  // namespace infinitybatch::tape
