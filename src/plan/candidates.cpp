#include "plan/candidates.hpp"

#include "execute/schedule.hpp"
#include "plan/largest.hpp"
#include "plan/probes.hpp"

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>

namespace infinitybatch::plan {
namespace {

// A whole batch that fits is split where that takes this much less. Sizes whose times differ by
// less change places from one timing to the next, and the whole batch is the step that native
// takes.
constexpr double kWorthSplitting = 0.97;

}  // namespace

Candidates::Candidates(const Request& request, const Learned& learned)
    : request_(request), learned_(learned), prediction_(request, learned) {
  if (request.whole_batch_only) {
    caps_ = {request.batch_size};
  } else if (request.fails_on > 0) {
    if (const auto size = largest_that_works()) caps_ = {*size};
  } else if (learned.shortages.last_resort() > 0) {
    caps_ = {learned.shortages.last_resort()};
  } else {
    find();
  }
}

/// Powers of two, the largest that fits, and the whole batch.
void Candidates::find() {
  const auto fits = [&](int64_t cap) { return prediction_.fits(request_.size_under(cap)); };
  const auto consider = [&](int64_t cap) {
    if (request_.reordered) cap = std::min(cap, request_.most());
    if (!fits(cap)) return false;
    const bool known =
        !caps_.empty() && request_.size_under(caps_.back()) == request_.size_under(cap);
    if (!known) caps_.push_back(cap);
    return true;
  };
  const int64_t whole = request_.most();
  int64_t cap = kSmallProbe * request_.unit();
  // Larger ones can fit where small ones do not: a coupled loss keeps something of every
  // micro-batch, and a step was measured where others are predicted.
  while ((consider(cap) || caps_.empty()) && cap < whole) cap *= 2;
  // The largest that fits lies between two of these.
  if (caps_.empty()) {
    if (fits(1)) consider(largest(1, kSmallProbe * request_.unit(), fits));
  } else if (caps_.back() < whole) {
    consider(largest(caps_.back(), std::min(2 * caps_.back(), whole), fits));
  }
  // One micro-batch needs no second buffer for any gradient: it may fit where its halves do not.
  // Rows of other lengths are packed, and the last of their sizes stands for the largest that fits.
  if (!request_.packing) consider(whole);
  // None is predicted to fit; a step of another size may have been measured to.
  for (const auto& [of, above] : learned_.steps) {
    if (!caps_.empty() || request_.packing) break;
    if (of.first == request_.batch_size) consider(of.second);
  }
}

/// The largest size that may fit, with more samples in each micro-batch than forward fails on.
std::optional<int64_t> Candidates::largest_that_works() const {
  int64_t cap = std::min(request_.most(), learned_.shortages.largest());
  while (cap > request_.fails_on) {
    const int64_t size = request_.size_under(cap);
    if (request_.batch_size / request_.count_under(size) <= request_.fails_on) break;
    if (prediction_.fits(size)) return size;
    cap = size - 1;
  }
  return std::nullopt;
}

bool Candidates::stays_whole(int64_t size) const {
  return size >= request_.whole() &&
         (!request_.two_pass || prediction_.kept_samples(size) == request_.batch_size);
}

int64_t Candidates::fastest() const {
  int64_t best_cap = 0;
  double best = INFINITY;
  // From the largest on: how many graphs fit is soon said of few micro-batches.
  for (auto cap = caps_.rbegin(); cap != caps_.rend(); ++cap) {
    const Timings::Timing* timing = timing_of(*cap);
    if (timing == nullptr) continue;
    if (request_.two_pass && timing->estimate(/*kept=*/1) > best) continue;  // whatever it keeps
    const int64_t size = request_.size_under(*cap);
    const double favour = stays_whole(size) ? kWorthSplitting : 1;
    const double estimate = favour * timing->estimate(prediction_.kept_share(size));
    // What is taken to be as fast as a smaller one saves calls beside it.
    const bool as_fast = estimate == best && !is_timed(best_cap);
    if (estimate > best || as_fast) continue;
    best = estimate;
    best_cap = *cap;
  }
  if (best_cap > 0) return best_cap;
  for (auto cap = caps_.rbegin(); cap != caps_.rend(); ++cap) {
    if (*cap <= kLargeProbe * request_.unit()) return *cap;
  }
  return caps_.empty() ? 1 : caps_.front();
}

bool Candidates::is_timed(int64_t cap) const {
  if (!request_.packing || caps_.size() < 2 || cap != caps_.back()) return true;
  const int64_t smallest = kSmallProbe * request_.unit();
  return cap % smallest == 0 && std::has_single_bit(static_cast<uint64_t>(cap / smallest));
}

const Timings::Timing* Candidates::timing_of(int64_t cap) const {
  if (is_timed(cap) || caps_.size() < 2) return learned_.timings.of(cap);
  return learned_.timings.of(caps_[caps_.size() - 2]);
}

bool Candidates::timed() const {
  if (caps_.size() == 1) {
    // Alone it is timed where plans that keep fewer boundary activations may be faster.
    const bool compared = request_.rehearses_sizes() && request_.goes_back &&
                          2 * request_.size_under(caps_.front()) <= request_.batch_size;
    if (!compared) return true;
  }
  return std::none_of(caps_.begin(), caps_.end(), [&](int64_t cap) {
    return is_timed(cap) && learned_.timings.wants(cap, request_.rehearses_sizes());
  });
}

std::optional<int64_t> Candidates::to_time(const Progress& progress) const {
  const Timings& timings = learned_.timings;
  const int64_t last = progress.timed_cap;
  const int64_t remaining = std::min(progress.end, request_.batch_size) - progress.row;
  // Where one micro-batch is the whole step the next step is the only way to time a warm one.
  if (progress.row == 0 && last > 0 && remaining == request_.batch_size &&
      request_.size_under(last) == request_.whole() && prediction_.fits(request_.whole()) &&
      timings.wants(last, request_.rehearses_sizes())) {
    return last;
  }
  // One size after the other, from the largest on: the first piece of each is not counted.
  if (request_.rehearses_sizes() && last > 0 &&
      std::find(caps_.begin(), caps_.end(), last) != caps_.end() && timings.wants(last, true) &&
      request_.size_under(last) <= remaining) {
    return last;
  }
  std::optional<int64_t> found;
  int fewest = INT_MAX;
  std::vector<int64_t> caps = caps_;
  if (request_.rehearses_sizes()) std::reverse(caps.begin(), caps.end());
  for (const int64_t cap : caps) {
    const int64_t size = request_.size_under(cap);
    const int pieces = timings.pieces(cap);
    if (pieces >= fewest || !is_timed(cap) || !timings.wants(cap, request_.rehearses_sizes()))
      continue;
    if (request_.packing ? full(cap, progress).empty() : size > remaining) continue;
    if (!fits_at(progress.row, size)) continue;
    found = cap;
    fewest = pieces;
  }
  return found;
}

std::vector<int64_t> Candidates::full(int64_t cap, const Progress& progress) const {
  std::vector<int64_t> sizes = request_.split(request_.size_under(cap), progress.row);
  // What is left for the last one may be less than it could take.
  if (sizes.size() > 1 || progress.row > 0) sizes.pop_back();
  int64_t end = progress.row;
  size_t within = 0;
  while (within < sizes.size() && end + sizes[within] <= progress.end) end += sizes[within++];
  sizes.resize(within);
  return sizes;
}

std::vector<int64_t> Candidates::sizes_to_time(int64_t cap, const Progress& progress) const {
  const bool first = cap != progress.timed_cap;
  const int64_t size = request_.size_under(cap);
  if (request_.packing) {
    const int64_t samples = std::max<int64_t>(1, size / request_.unit());
    std::vector<int64_t> sizes = full(cap, progress);
    const int64_t count = learned_.timings.count(cap, samples, first);
    if (std::ssize(sizes) > count) sizes.resize(static_cast<size_t>(count));
    return sizes;
  }
  if (request_.segments > 0) return {size};  // all micro-batches of a piece go together
  const int64_t count = learned_.timings.count(cap, size, first);
  const int64_t most = (request_.batch_size - progress.row) / size;
  return std::vector<int64_t>(static_cast<size_t>(std::min(count, most)), size);
}

std::vector<int64_t> Candidates::split_rest(const Progress& progress) const {
  // Where the longest rows are not known to fit others may be far from them.
  const bool none = request_.packing && caps_.empty();
  int64_t size = none ? kLargeProbe * request_.unit() : request_.size_under(fastest());
  while (size > 1 && !fits_at(progress.row, size)) size -= (size + 31) / 32;
  std::vector<int64_t> sizes = request_.split(size, progress.row);
  int64_t end = progress.row;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (end + sizes[i] >= progress.end) {
      sizes[i] = progress.end - end;
      sizes.resize(i + 1);
    }
    end += sizes[i];
  }
  return sizes;
}

bool is_settled(const Request& request, const Learned& learned) {
  return !probe_size(request, learned) && !length_to_learn(request, learned, /*row=*/0) &&
         Candidates(request, learned).timed();
}

}  // namespace infinitybatch::plan
