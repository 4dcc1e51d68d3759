#pragma once

#include "plan/narrow_places.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch::plan {

/// Looks for cuts of one stretch of a tape: by dynamic programming over its narrow places those
/// whose last segment, which is not computed again, is the longest, and in front of it those at
/// which the least waits. Of the bounds on what is there at once the largest inside the budget
/// wins.
class CutSearch {
 public:
  struct Beside {
    bool offloaded = false;  ///< what waits leaves the device
    int64_t others = 0;      ///< micro-batches at all of whose cuts something waits
    int64_t elsewhere = 0;   ///< bytes that are there all the while
  };
  struct Room {
    int64_t available = 0;         ///< bytes
    double correction = 1.0;       ///< needed ÷ estimated, beside `sums`
    std::optional<int64_t> fixed;  ///< segments wished for; nothing: as they fit
    bool overlaps = false;         ///< frontiers may come back while others are at work
  };
  struct Choice {
    std::vector<uint32_t> ops;  ///< in front of which it is cut
    int64_t peak = 0;           ///< estimated, before any correction
    int64_t overlapped = 0;     ///< the same, with the next frontier on its way
    bool smallest = false;      ///< that does not fit, and no other cuts need less
  };

  /// \param begin, end of the stretch, as indices into the places
  CutSearch(const NarrowPlaces& places, size_t begin, size_t end, const Beside& beside);

  Choice choose(const Room& room) const;
  /// Of the gradients' sums and what is elsewhere, which no choice can do without: these are known
  /// exactly, and the estimate is of the rest.
  int64_t sums() const { return places_.gradients(ends_[0]) + beside_.elsewhere; }

 private:
  /// Cuts as indices into the stretch's places.
  struct Cuts {
    std::vector<size_t> places;
    int64_t peak = 0;
    int64_t overlapped = 0;
  };
  std::optional<Cuts> within(int64_t bound) const;
  int64_t loosest(int64_t whole) const;
  int64_t at_work(size_t i, size_t j) const {
    return places_.at_work(begin_ + i, begin_ + j) + beside_.elsewhere;
  }
  int64_t peak(const std::vector<size_t>& cuts, bool overlapped) const;

  const NarrowPlaces& places_;
  size_t begin_;
  std::vector<uint32_t> ends_;
  Beside beside_;
};

}  // namespace infinitybatch::plan
