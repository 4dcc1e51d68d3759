#pragma once

#include "plan/learned.hpp"
#include "plan/prediction.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch::plan {

/// The ways to split a step that fit by all that is known, as upper ends of sizes, rising; and the
/// choice among them: time first, inside the bytes. A logical batch is split evenly into
/// micro-batches of at most that size, so that batches of different sizes share what was timed.
///
/// Where one split alone is exact, or possible, it is the only one. Else they are powers of two,
/// the largest that fits between two of these, and the whole batch where it fits.
class Candidates {
 public:
  Candidates(const Request& request, const Learned& learned);

  const std::vector<int64_t>& caps() const noexcept { return caps_; }
  bool empty() const noexcept { return caps_.empty(); }

  /// Of those that were timed the one with which the step takes the least time, with the second
  /// forwards that it saves. Before: the largest that probes have shown to work, else the smallest
  /// that fits.
  int64_t fastest() const;
  /// Whether a micro-batch of this size is the step that native takes: all samples, one forward.
  bool stays_whole(int64_t size) const;

  /// How long it takes; null where nobody knows.
  const Timings::Timing* timing_of(int64_t cap) const;
  /// Whether each has been timed often enough to choose.
  bool timed() const;
  /// Where a step is: rows that have run, and what was timed last in it or the step before.
  struct Progress {
    int64_t row = 0;
    int64_t timed_cap = 0;
    int64_t end = INT64_MAX;  ///< rows from there on are not for this piece
  };
  /// The wanted one that was timed in the fewest pieces, of those that fit into the step's rest.
  std::optional<int64_t> to_time(const Progress& progress) const;
  /// The micro-batches of `cap` that the next timed piece runs.
  std::vector<int64_t> sizes_to_time(int64_t cap, const Progress& progress) const;
  /// Rows that are left, in the fastest size that fits there.
  std::vector<int64_t> split_rest(const Progress& progress) const;

 private:
  void find();
  /// The largest size that fits is another one for each batch of other lengths: it is taken to be
  /// as fast as the next smaller one, a power of two.
  bool is_timed(int64_t cap) const;
  std::optional<int64_t> largest_that_works() const;
  bool fits_at(int64_t row, int64_t size) const {
    return row == 0 || prediction_.fits_later(size, row);
  }
  /// Of rows that are packed: those of these micro-batches that take what `cap` says, and are no
  /// rest of the rows.
  std::vector<int64_t> full(int64_t cap, const Progress& progress) const;

  const Request& request_;
  const Learned& learned_;
  Prediction prediction_;
  std::vector<int64_t> caps_;
};

/// Whether the choice will not change any more unless memory runs out.
bool is_settled(const Request& request, const Learned& learned);

}  // namespace infinitybatch::plan
