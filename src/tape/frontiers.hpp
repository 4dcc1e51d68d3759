#pragma once

#include "tape/segment.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace infinitybatch::tape {

/// For each place in front of an op of a recording, and for its end: a hash of the ops before it
/// (which operators, on which values), so that programs are told apart while they are recorded.
/// Positions are those before `trim`. Plain arguments do not count: no guide depends on them.
using Fingerprints = std::vector<uint64_t>;

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
  Fingerprints program;       ///< of the earlier recording: it guides while they are the same
  bool operator==(const FrontierGuide&) const = default;
};

/// \param tape     trimmed
/// \param segments into which it was cut
/// \param program  of its recording
FrontierGuide guide_of(const Tape& tape, const std::vector<Segment>& segments,
                       Fingerprints program);

/// What waits at the cuts, kept while user code ran on.
struct Frontiers {
  std::map<Crossing, at::Tensor> waiting;  ///< detached
  std::set<Crossing> differentiable;
  std::vector<std::vector<Draw>> random;  ///< the default generators at each cut, where needed
  /// The graph behind the last cut was kept, and begins at `starts`: leaves of its own, in place of
  /// what takes gradients at that cut.
  bool tail = false;
  std::vector<std::pair<Crossing, at::Tensor>> starts;
  /// Of the tensors that stand at these leaves: with the last copy of it they get the history back
  /// that they had. Keep it until nothing is built on them any more.
  std::shared_ptr<const void> histories;
  /// A graph was kept, if only for a while: what its ops save is a guess in `Tape::costs`.
  bool guessed = false;
  Fingerprints program;  ///< of this recording, whatever the guide's was

  /// Whether everything is there that `segments` give. Where the program differs from the guide's,
  /// all is let go of.
  bool complete(const std::vector<Segment>& segments) const;
};

}  // namespace infinitybatch::tape
