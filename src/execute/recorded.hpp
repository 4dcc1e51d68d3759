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
  std::vector<int64_t> stretches{0};  ///< the first segment of each
  /// The segments that need a value, rising: those that take it, and in front of an op of the whole
  /// batch the one that adds to the gradients of what the op was given.
  std::map<tape::Crossing, std::vector<int64_t>> users;
  std::map<tape::ValueId, int64_t> last_writer;  ///< the last segment to write what it takes
  /// It may be used again in later steps: in buffers it reads what they hold then.
  bool outlives_step = false;

  /// Fills both once the tape is cut.
  void note_users();
  /// The last segment in front of `end` that needs a value; -1 where none does.
  int64_t last_user(tape::Crossing crossing, int64_t end) const;

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
