#pragma once

#include <infinitybatch/tape/segment.hpp>

#include <map>
#include <set>
#include <vector>

namespace infinitybatch::tape {

/// Where a recording has to keep what waits at the cuts of an earlier one of the same program.
struct FrontierGuide {
  struct Given {
    ValueId value = kNoValue;
    bool changed = false;  ///< its memory is written after the cut: keep a copy
    bool operator==(const Given&) const = default;
  };
  struct Place {
    uint32_t op = 0;           ///< position before `trim`
    std::vector<Given> gives;  ///< of the segment that ends here
    bool draws = false;        ///< the segment that begins here draws random numbers
    bool operator==(const Place&) const = default;
  };
  std::vector<Place> places;  ///< one for each cut, in order
  std::vector<Take> last;     ///< what the last segment takes
  bool operator==(const FrontierGuide&) const = default;
};

/// \param tape     trimmed
/// \param segments into which it was cut
FrontierGuide guide_of(const Tape& tape, const std::vector<Segment>& segments);

/// What waits at the cuts, kept while user code ran on.
struct Frontiers {
  std::map<Crossing, at::Tensor> waiting;  ///< detached
  std::set<Crossing> differentiable;
  std::vector<std::vector<Draw>> random;  ///< the default generators at each cut, where needed
  /// The graph behind the last cut was kept, and begins at `starts`: leaves of its own, in place of
  /// what takes gradients at that cut.
  bool tail = false;
  std::vector<std::pair<Crossing, at::Tensor>> starts;

  /// Whether everything is there that `segments` give. Recordings of other programs than the
  /// guide's miss something.
  bool complete(const std::vector<Segment>& segments) const;
};

}  // namespace infinitybatch::tape
