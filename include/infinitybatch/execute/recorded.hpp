#pragma once

#include <infinitybatch/tape/segment.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace infinitybatch {

/// A micro-batch's tape and where it is cut.
struct Recorded {
  tape::Tape tape;
  std::vector<tape::Segment> segments;
  std::map<tape::Crossing, int64_t> first_user;  ///< the last segment to need a value in backward
  std::map<tape::Crossing, int64_t> last_user;   ///< and in forward

  /// Fills `first_user` and `last_user` once the tape is cut.
  void note_users() {
    for (size_t s = 0; s < segments.size(); ++s) {
      for (const tape::Take& take : segments[s].takes) {
        first_user.try_emplace(take.from, static_cast<int64_t>(s));
        last_user[take.from] = static_cast<int64_t>(s);
      }
    }
  }

  const tape::Op& first_op(int64_t segment) const {
    return tape.ops[segments[static_cast<size_t>(segment)].ops.begin];
  }
};

/// With `static_graph`: recordings of one kind of batch that later micro-batches and steps reuse,
/// by the number of rows.
struct StaticTapes {
  struct Entry {
    std::shared_ptr<const Recorded> recorded;
    bool confirmed = false;  ///< another micro-batch gave the same program
  };
  std::map<int64_t, Entry> by_rows;
  std::vector<const void*> owned;  ///< parameters and buffers that they were recorded with
};

}  // namespace infinitybatch
