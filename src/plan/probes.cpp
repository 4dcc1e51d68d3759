#include "plan/probes.hpp"

#include "plan/candidates.hpp"
#include "plan/prediction.hpp"

#include <algorithm>

namespace infinitybatch::plan {
namespace {

// On accelerators, where blocks are rounded: as large as this where that fits, so that it is
// little.
constexpr int64_t kMostProbed = 64;
// Below this there are not enough samples for both probes (2 and 4): sizes are tried as they are.
constexpr int64_t kSmallestProfiled = 6;

/// Two samples first: they show what larger sizes need at most, and take what is taken only once.
bool is_first(const Request& request, const Learned& learned) {
  return request.measured && learned.peaks.empty();
}

int64_t small_probe(const Request& request, const Prediction& prediction) {
  int64_t size = kSmallProbe;
  if (!request.measured) return size;
  while (4 * size <= kMostProbed && 16 * size <= request.batch_size && prediction.fits(4 * size)) {
    size *= 2;
  }
  return size;
}

}  // namespace

std::optional<int64_t> probe_size(const Request& request, const Learned& learned) {
  const int64_t largest = learned.shortages.largest();
  if (request.fails_on > 0) {
    // A second pass, which cannot begin again, comes later: once in front of it.
    if (!request.two_pass) return std::nullopt;
    const Candidates candidates(request, learned);
    if (candidates.empty() || learned.peaks.contains(candidates.caps()[0])) return std::nullopt;
    return candidates.caps()[0];
  }
  if (learned.profile || learned.irregular || request.whole_batch_only ||
      learned.shortages.last_resort() > 0) {
    return std::nullopt;
  }
  if (is_first(request, learned)) return std::min({kSmallProbe, largest, request.batch_size});
  if (request.batch_size < kSmallestProfiled) {
    // Too few for a profile: the whole batch first, then halves.
    if (!learned.peaks.empty()) return std::nullopt;
    return std::min(request.batch_size, largest);
  }
  // Where two samples do not fit there is nothing to compare: one is run to see what it needs.
  if (largest < kSmallProbe) {
    return learned.peaks.contains(1) ? std::nullopt : std::optional<int64_t>(1);
  }
  const Prediction prediction(request, learned);
  const bool none = learned.traces.empty();
  const int64_t small = none ? small_probe(request, prediction) : learned.traces.front().size;
  const int64_t large = small * (kLargeProbe / kSmallProbe);
  if (request.measured && !prediction.fits(none ? small : large)) return std::nullopt;
  if (none) return small;
  if (largest < large) return std::nullopt;
  // A third trace replaces the first, in which some kernels ran for the first time.
  return learned.traces.size() == 1 ? large : small;
}

bool is_traced(const Request& request, const Learned& learned, int64_t size, int64_t rows) {
  return !is_first(request, learned) && size >= kSmallProbe && size <= rows &&
         request.batch_size >= kSmallestProfiled;
}

}  // namespace infinitybatch::plan
