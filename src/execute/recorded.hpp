#pragma once

#include "tape/segment.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace infinitybatch {

/// A micro-batch's tape and where it is cut. Segments between two ops of the whole batch are a
/// stretch: all micro-batches go through a stretch before any of them begins the next.
struct Recorded {
  tape::Tape tape;
  std::vector<tape::Segment> segments;
  std::vector<int64_t> stretches{0};             ///< the first segment of each
  std::map<tape::Crossing, int64_t> first_user;  ///< the last segment to need a value in backward
  std::map<tape::Crossing, int64_t> last_user;   ///< and in forward
  std::map<tape::ValueId, int64_t> last_writer;  ///< the last segment to write what it takes
  /// It may be used again in later steps: in buffers it reads what they hold then.
  bool outlives_step = false;

  /// Fills the three once the tape is cut.
  void note_users() {
    for (size_t s = 0; s < segments.size(); ++s) {
      for (const tape::Take& take : segments[s].takes) {
        first_user.try_emplace(take.from, static_cast<int64_t>(s));
        last_user[take.from] = static_cast<int64_t>(s);
        if (take.written) last_writer[take.from.value] = static_cast<int64_t>(s);
      }
    }
  }

  /// The stretch that a segment belongs to.
  int64_t stretch_of(int64_t segment) const {
    return std::upper_bound(stretches.begin(), stretches.end(), segment) - stretches.begin() - 1;
  }
  bool begins_stretch(int64_t segment) const {
    return std::binary_search(stretches.begin(), stretches.end(), segment);
  }
  /// The first segment of the stretch that a segment belongs to.
  int64_t first_beside(int64_t segment) const {
    return stretches[static_cast<size_t>(stretch_of(segment))];
  }
  /// The last one.
  int64_t last_beside(int64_t segment) const {
    const auto next = static_cast<size_t>(stretch_of(segment)) + 1;
    return (next < stretches.size() ? stretches[next] : static_cast<int64_t>(segments.size())) - 1;
  }

  const tape::Op& first_op(int64_t segment) const {
    return tape.ops[segments[static_cast<size_t>(segment)].ops.begin];
  }
};

}  // namespace infinitybatch
