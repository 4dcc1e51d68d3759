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

// Lengths that are traced, and traces that may tell other stories than the first, before a bound
// is all that there is.
constexpr size_t kLengths = 3;
constexpr size_t kMostLengths = 8;
constexpr int kOtherStories = 4;

/// The length that would tell the most; 0 where none would tell much.
int64_t length_wanted(const std::vector<int64_t>& known, int64_t longest, int64_t shortest) {
  const auto far_below = [](int64_t length, int64_t from, double share) {
    return static_cast<double>(length) < share * static_cast<double>(from);
  };
  if (far_below(known.back(), longest, .8)) return longest;
  if (known.size() >= kLengths) return far_below(shortest, known.front(), .5) ? shortest : 0;
  // A parabola through neighbours says little of what is far from them.
  const double kNear = known.size() == 1 ? .99 : .95;
  if (known.size() == 1 && far_below(shortest, known.front(), kNear)) {
    // Half way down, and then the shortest: of a batch of one length it is that one.
    return longest == shortest ? shortest : (shortest + std::min(longest, known.front())) / 2;
  }
  if (far_below(shortest, known.front(), kNear)) return shortest;
  if (far_below(known.back(), longest, kNear)) return longest;
  if (known.size() == 1) return 0;
  const int64_t middle = std::clamp((known.front() + known.back()) / 2, shortest, longest);
  const bool tells =
      far_below(known.front(), middle, kNear) && far_below(middle, known.back(), kNear);
  return tells ? middle : 0;
}

/// The first of these lengths, which fall, that is no more than `limit`.
std::vector<int64_t>::const_iterator first_below(const std::vector<int64_t>& lengths,
                                                 int64_t limit) {
  return std::find_if(lengths.begin(), lengths.end(),
                      [limit](int64_t length) { return length <= limit; });
}

/// Two samples first: they show what larger sizes need at most, and take what is taken only once.
bool is_first(const Request& request, const Learned& learned) {
  return request.measured && learned.peaks.empty();
}

/// \param largest size that has not run out of memory
int64_t small_probe(const Request& request, const Prediction& prediction, int64_t largest) {
  int64_t size = kSmallProbe;
  if (!request.measured) return size;
  while (4 * size <= kMostProbed && 16 * size <= request.batch_size && 4 * size <= largest &&
         prediction.fits_alone(4 * size)) {
    size *= 2;
  }
  return size;
}

}  // namespace

std::optional<int64_t> probe_size(const Request& request, const Learned& learned) {
  const int64_t largest =
      std::min(learned.shortages.largest(), request.batch_size - (request.reordered ? 1 : 0));
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
  if (is_first(request, learned)) return std::min(kSmallProbe, largest);
  if (request.batch_size < kSmallestProfiled) {
    // Too few for a profile: the whole batch first, then halves.
    if (!learned.peaks.empty()) return std::nullopt;
    return largest;
  }
  // Where two samples do not fit there is nothing to compare: one is run to see what it needs.
  if (largest < kSmallProbe) {
    return learned.peaks.contains(1) ? std::nullopt : std::optional<int64_t>(1);
  }
  const Prediction prediction(request, learned);
  const bool none = learned.traces.empty();
  const int64_t small =
      none ? small_probe(request, prediction, largest) : learned.traces.front().size;
  const int64_t large = small * (kLargeProbe / kSmallProbe);
  if (request.measured && !prediction.fits_alone(none ? small : large)) return std::nullopt;
  if (none) return small;
  if (largest < large) return std::nullopt;
  // A third trace replaces the first, in which some kernels ran for the first time.
  return learned.traces.size() == 1 ? large : small;
}

AtLength where_to_probe(const Request& request, const Learned& learned, int64_t row) {
  const bool first = learned.traces.empty();
  const int64_t limit = first ? learned.reference_limit : learned.traces.back().length;
  const auto at =
      std::max<int64_t>(row, first_below(request.lengths, limit) - request.lengths.begin());
  if (at >= request.batch_size) return {request.batch_size, 0};
  return {at, first ? request.lengths[static_cast<size_t>(at)] : limit};
}

bool may_probe_at_length(const Request& request, const Learned& learned) {
  return request.lengths.end() - first_below(request.lengths, learned.reference_limit) >=
         kSmallestProfiled;
}

std::optional<AtLength> length_to_learn(const Request& request, const Learned& learned,
                                        int64_t row) {
  if (!request.packing || request.batch_size < kLargeProbe) return std::nullopt;
  const std::vector<int64_t>& lengths = request.lengths;
  const std::vector<int64_t> known = learned.profile->lengths();
  if (known.size() >= kMostLengths || learned.other_stories >= kOtherStories) return std::nullopt;
  const auto first = first_below(lengths, learned.too_long - 1);
  if (first == lengths.end()) return std::nullopt;
  int64_t wanted = learned.wanted_length;
  if (wanted == 0) wanted = length_wanted(known, *first, lengths.back());
  if (wanted == 0) return std::nullopt;
  const auto place = std::clamp(first_below(lengths, wanted), first, lengths.end() - 1);
  const int64_t at =
      std::clamp<int64_t>(place - lengths.begin(), kSmallProbe, request.batch_size - kSmallProbe);
  const int64_t length = std::max(*place, lengths[static_cast<size_t>(at)]);
  const bool is_known = std::find(known.begin(), known.end(), length) != known.end();
  if (is_known && learned.wanted_length != length) return std::nullopt;
  // Rows without any padding may take another way through forward: some are given a position more.
  const bool more = length < lengths.front() && learned.other_stories % 2 == 1;
  const int64_t padded = more ? length + 1 : length;
  if (at < row || padded >= learned.too_long) return std::nullopt;
  return AtLength{at, padded};
}

bool is_traced(const Request& request, const Learned& learned, int64_t size, int64_t rows) {
  return !is_first(request, learned) && size >= kSmallProbe && size <= rows &&
         request.batch_size >= kSmallestProfiled;
}

}  // namespace infinitybatch::plan
