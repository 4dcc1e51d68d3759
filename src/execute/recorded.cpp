#include "execute/recorded.hpp"

#include "tape/arguments.hpp"

#include <iterator>

namespace infinitybatch {

void Recorded::note_users() {
  const auto note = [this](tape::Crossing crossing, int64_t segment) {
    std::vector<int64_t>& known = users[crossing];
    const auto place = std::lower_bound(known.begin(), known.end(), segment);
    if (place == known.end() || *place != segment) known.insert(place, segment);
  };
  for (int64_t s = 0; s < static_cast<int64_t>(segments.size()); ++s) {
    for (const tape::Take& take : segments[static_cast<size_t>(s)].takes) {
      note(take.from, s);
      if (take.written) last_writer[take.from.value] = s;
    }
    if (s == 0 || !begins_stretch(s)) continue;
    tape::for_each_argument(tape, first_op(s), [&](tape::ValueId value, const tape::Slot&) {
      for (const tape::Take& take : segments[static_cast<size_t>(s)].takes) {
        // What the segment in front of the op gives, it has at hand.
        if (take.from.value == value && take.from.giver < s - 1) note(take.from, s - 1);
      }
    });
  }
}

int64_t Recorded::last_user(tape::Crossing crossing, int64_t end) const {
  const auto known = users.find(crossing);
  if (known == users.end()) return -1;
  const auto behind = std::lower_bound(known->second.begin(), known->second.end(), end);
  return behind == known->second.begin() ? -1 : *std::prev(behind);
}

}  // namespace infinitybatch
