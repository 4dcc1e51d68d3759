#pragma once

#include "execute/profile.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

namespace infinitybatch::plan {

/// How the rows of a step, sorted by length, are split into micro-batches that take about as many
/// bytes each: few long ones, many short ones.
///
/// Sizes are told in one unit at every length, parts of a row as long as those that the profile was
/// fit to: what so many of these take, rows of another length may take, too. So sizes that were
/// timed, or ran out of memory, mean something to batches of other lengths.
class Packing {
 public:
  /// Parts of a row.
  static constexpr int64_t kUnit = 16;

  /// \param request with the lengths of its rows
  Packing(const Request& request, const MicroBatchProfile& profile);

  /// The rows from `row` on, the longest first, as many at a time as take what `size` says; one at
  /// least.
  std::vector<int64_t> split(int64_t row, int64_t size) const;
  /// The smallest size at which so many rows from `row` on are one micro-batch.
  int64_t size_of(int64_t row, int64_t rows) const;
  /// What was simulated of these rows, in bytes above what is live before.
  using Simulated = std::tuple<int64_t, int64_t, bool, int64_t, int64_t>;
  template <typename Simulate>
  int64_t remembered(const Simulated& what, const Simulate& simulate) const {
    const auto [found, is_new] = simulated_.try_emplace(what, 0);
    if (is_new) found->second = simulate();
    return found->second;
  }
  /// Rows of the profile's length that take as long, about: as many bytes.
  double work(int64_t row, int64_t rows) const;

 private:
  /// So many rows from `row` on take no more than these bytes; one at least, all at most.
  int64_t fit(int64_t row, double bytes) const;
  /// Rows at the end of a micro-batch go to the next one, which is trimmed to less, where it has
  /// room for them and less is computed in all.
  void shift(std::vector<int64_t>& ends, double bytes) const;

  bool alike_;  // all rows: then micro-batches are as equal as can be
  AffineBytes reference_;
  std::vector<AffineBytes> by_row_;  // of micro-batches whose longest row it is
  mutable std::map<Simulated, int64_t> simulated_;
};

}  // namespace infinitybatch::plan
