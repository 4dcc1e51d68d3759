#include "plan/next_sizes.hpp"

#include "execute/schedule.hpp"
#include "plan/packing.hpp"
#include "plan/plans.hpp"
#include "plan/probes.hpp"

#include <algorithm>

namespace infinitybatch::plan {
namespace {

/// With lengths, before there is a profile.
std::vector<int64_t> probe_at_length(const Request& request, const Learned& learned,
                                     const Candidates::Progress& from, int64_t rows, Piece& piece) {
  auto [row, length] = where_to_probe(request, learned, from.row);
  if (row + rows > request.batch_size) {
    if (request.two_pass) return {};  // the next rehearsal begins with all rows again
    row = request.batch_size;
  }
  if (row > from.row && !request.two_pass) {  // all rows of a stream have to run
    const int64_t longest = request.lengths[static_cast<size_t>(from.row)];
    piece.size = longest < learned.too_long ? kSmallProbe : 1;
    if (from.row > 0) return split_by(row - from.row, piece.size);
    piece.trace = true;  // the first of all tells which gradients become buffers
    return {std::min(piece.size, row)};
  }
  piece.first_row = row;
  piece.size = rows;
  piece.least_length = length;
  piece.trace = is_traced(request, learned, rows, rows);
  return {rows};
}

}  // namespace

std::vector<int64_t> next_sizes(const Request& request, const Learned& learned,
                                const Candidates::Progress& from, Piece& piece) {
  const int64_t remaining = request.batch_size - from.row;
  if (const auto probe = probe_size(request, learned)) {
    const size_t count = probed_micro_batches(request);
    if (!request.lengths.empty()) return probe_at_length(request, learned, from, *probe, piece);
    // The next rehearsal begins with all rows again.
    if (count > 1 && remaining < *probe * static_cast<int64_t>(count)) return {};
    piece.trace = is_traced(request, learned, *probe, remaining);
    piece.size = std::min(*probe, remaining);
    return std::vector<int64_t>(count, piece.size);
  }
  const Candidates candidates(request, learned);
  Candidates::Progress progress = from;
  progress.end = request.batch_size;
  if (const auto learn = length_to_learn(request, learned, progress.row)) {
    // A rehearsal passes over what lies before it; of a stream all rows have to run.
    if (learn->row == progress.row || (request.two_pass && progress.row > 0)) {
      piece.first_row = learn->row;
      piece.size = request.packing->size_of(learn->row, kSmallProbe);
      piece.least_length = learn->length;
      piece.trace = true;
      return {kSmallProbe};
    }
    progress.end = learn->row;
    if (request.two_pass) {
      const int64_t rows = request.lengths.front() < learned.too_long ? kSmallProbe : 1;
      piece.size = request.packing->size_of(0, rows);
      piece.ahead = true;
      return {rows};
    }
  } else if (request.two_pass && length_to_learn(request, learned, /*row=*/0)) {
    return {};  // the next rehearsal comes by it
  }
  if (!candidates.timed()) {
    if (const auto cap = candidates.to_time(progress)) {
      piece.timed_cap = *cap;
      piece.size = request.size_under(*cap);
      return candidates.sizes_to_time(*cap, progress);
    }
  }
  std::vector<int64_t> sizes = candidates.split_rest(progress);
  piece.size = request.packing ? request.size_under(candidates.fastest())
                               : *std::max_element(sizes.begin(), sizes.end());
  return sizes;
}

}  // namespace infinitybatch::plan
