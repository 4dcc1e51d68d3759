#include "plan/candidates.hpp"

#include "execute/schedule.hpp"
#include "plan/probes.hpp"

#include <algorithm>
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

/// Powers of two, and the largest that fits.
void Candidates::find() {
  const auto fits = [&](int64_t cap) { return prediction_.fits(request_.size_under(cap)); };
  const auto consider = [&](int64_t cap) {
    if (!fits(cap)) return false;
    const bool known =
        !caps_.empty() && request_.size_under(caps_.back()) == request_.size_under(cap);
    if (!known) caps_.push_back(cap);
    return true;
  };
  int64_t cap = kSmallProbe;
  // Larger ones can fit where small ones do not: a coupled loss keeps something of every
  // micro-batch, and a step was measured where others are predicted.
  while ((consider(cap) || caps_.empty()) && cap < request_.batch_size) cap *= 2;
  if (caps_.empty()) {
    consider(1);
  } else if (caps_.back() < request_.batch_size) {
    // The largest that fits lies between this power of two and the next.
    int64_t low = caps_.back();
    int64_t high = std::min(2 * low, request_.batch_size);
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    consider(low);
  }
}

/// The largest size that may fit, with more samples in each micro-batch than forward fails on.
std::optional<int64_t> Candidates::largest_that_works() const {
  int64_t cap = std::min(request_.batch_size, learned_.shortages.largest());
  while (cap > request_.fails_on) {
    const int64_t size = request_.size_under(cap);
    if (request_.batch_size / request_.count_under(size) <= request_.fails_on) break;
    if (prediction_.fits(size)) return size;
    cap = size - 1;
  }
  return std::nullopt;
}

bool Candidates::stays_whole(int64_t size) const {
  return size >= request_.batch_size && (!request_.two_pass || prediction_.retained(size) > 0);
}

int64_t Candidates::fastest() const {
  int64_t best_cap = 0;
  double best = INFINITY;
  // From the largest on: how many graphs fit is soon said of few micro-batches.
  for (auto cap = caps_.rbegin(); cap != caps_.rend(); ++cap) {
    const Timings::Timing* timing = learned_.timings.of(*cap);
    if (timing == nullptr) continue;
    if (request_.two_pass && timing->estimate(/*kept=*/1) > best) continue;  // whatever it keeps
    const int64_t size = request_.size_under(*cap);
    const double favour = stays_whole(size) ? kWorthSplitting : 1;
    const double estimate = favour * timing->estimate(prediction_.kept_share(size));
    if (estimate > best) continue;
    best = estimate;
    best_cap = *cap;
  }
  if (best_cap > 0) return best_cap;
  for (auto cap = caps_.rbegin(); cap != caps_.rend(); ++cap) {
    if (*cap <= kLargeProbe) return *cap;
  }
  return caps_.empty() ? 1 : caps_.front();
}

bool Candidates::timed() const {
  return caps_.size() == 1 || std::none_of(caps_.begin(), caps_.end(), [&](int64_t cap) {
           return learned_.timings.wants(cap);
         });
}

std::optional<int64_t> Candidates::to_time(const Progress& progress) const {
  const auto& [row, last] = progress;
  const Timings& timings = learned_.timings;
  const int64_t remaining = request_.batch_size - row;
  // Where one micro-batch is the whole step the next step is the only way to time a warm one.
  if (row == 0 && last > 0 && request_.size_under(last) == remaining &&
      prediction_.fits(remaining) && timings.wants(last)) {
    return last;
  }
  std::optional<int64_t> found;
  int fewest = INT_MAX;
  for (const int64_t cap : caps_) {
    const int64_t size = request_.size_under(cap);
    const int pieces = timings.pieces(cap);
    if (pieces >= fewest || size > remaining) continue;
    if (!timings.wants(cap) || !fits_at(row, size)) continue;
    found = cap;
    fewest = pieces;
  }
  return found;
}

int64_t Candidates::count_to_time(int64_t cap, const Progress& progress) const {
  if (request_.segments > 0) return 1;  // all micro-batches of a piece go together
  const int64_t size = request_.size_under(cap);
  const int64_t count = learned_.timings.count(cap, size, /*first=*/cap != progress.timed_cap);
  return std::min(count, (request_.batch_size - progress.row) / size);
}

std::vector<int64_t> Candidates::split_rest(int64_t row) const {
  int64_t size = request_.size_under(fastest());
  while (size > 1 && !fits_at(row, size)) size -= (size + 31) / 32;
  return split_evenly(request_.batch_size - row, size);
}

bool is_settled(const Request& request, const Learned& learned) {
  return !probe_size(request, learned) && Candidates(request, learned).timed();
}

}  // namespace infinitybatch::plan
