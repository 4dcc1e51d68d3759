#include "plan/planner.hpp"

#include "execute/schedule.hpp"
#include "execute/simulator.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>
#include <utility>

namespace infinitybatch {
namespace {

// A whole batch that fits is split where that takes this much less. Sizes whose times differ by
// less change places from one timing to the next, and the whole batch is the step that native
// takes.
constexpr double kWorthSplitting = 0.97;
// On accelerators, where blocks are rounded: as large as this where that fits, so that it is
// little.
constexpr int64_t kMostProbed = 64;
// Blocks of the caching allocators of CUDA, HIP and XPU.
constexpr int64_t kRounding = 512;
// Below this there are not enough samples for both probes (2 and 4): sizes are tried as they are.
constexpr int64_t kSmallestProfiled = 6;

int64_t even_size(int64_t batch_size, int64_t at_most) {
  const int64_t count = (batch_size + at_most - 1) / at_most;
  return (batch_size + count - 1) / count;
}

/// But for what is live when the step starts.
bool is_alike(const Request& request, const Request& other) {
  return request.signature == other.signature && request.dims == other.dims &&
         request.batch_size == other.batch_size && request.budget_bytes == other.budget_bytes &&
         request.whole_batch_only == other.whole_batch_only && request.fails_on == other.fails_on;
}

}  // namespace

void Planner::begin(const Request& request) {
  const bool same =
      is_alike(request, request_) && request.baseline_bytes == request_.baseline_bytes;
  request_ = request;
  row_ = 0;
  smallest_failed_ = false;
  attempted_retained_ = 0;
  attempted_overlap_ = false;
  const Knowledge* before = known_;
  choose_knowledge();
  if (!same || known_ != before || may_try_again()) forget_settled_plan();
  if (settled_plan_) return;
  // Shorter samples may fit where those whose plan they would follow do not.
  if (borrowed_ && candidates().empty()) stop_borrowing();
  if (request.fails_on > 0 && candidates().empty()) refuse_larger(0);
  if (known_->profile && candidates().empty() && !find_last_resort()) refuse_smallest(0);
}

std::vector<int64_t> Planner::candidates() const {
  if (request_.whole_batch_only) return {request_.batch_size};
  if (request_.fails_on > 0) return largest_candidate();
  if (known_->last_resort > 0) return {known_->last_resort};
  std::vector<int64_t> caps;
  const auto consider = [&](int64_t cap) {
    if (!fits(size_under(cap))) return false;
    const bool known = !caps.empty() && size_under(caps.back()) == size_under(cap);
    if (!known) caps.push_back(cap);
    return true;
  };
  int64_t cap = kSmallProbe;
  // Larger ones can fit where small ones do not: a coupled loss keeps something of every
  // micro-batch, and a step was measured where others are predicted.
  while ((consider(cap) || caps.empty()) && cap < request_.batch_size) cap *= 2;
  if (caps.empty()) {
    consider(1);
  } else if (caps.back() < request_.batch_size) {
    // The largest that fits lies between this power of two and the next.
    int64_t low = caps.back();
    int64_t high = std::min(2 * low, request_.batch_size);
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(size_under(middle)) ? low : high) = middle;
    }
    consider(low);
  }
  return caps;
}

std::vector<int64_t> Planner::largest_candidate() const {
  int64_t cap = std::min(request_.batch_size, known_->largest);
  while (cap > request_.fails_on) {
    const int64_t size = size_under(cap);
    const int64_t count = (request_.batch_size + size - 1) / size;
    if (request_.batch_size / count <= request_.fails_on) break;
    if (fits(size)) return {size};
    cap = size - 1;
  }
  return {};
}

int64_t Planner::size_under(int64_t cap) const {
  return even_size(request_.batch_size, cap);
}

int64_t Planner::predicted_peak(int64_t size) const {
  const int64_t baseline = request_.baseline_bytes;
  double above = 0;
  if (known_->profile) {
    above = static_cast<double>(simulated_peak(size) - baseline);
  } else if (known_->ragged) {
    above = ragged_peak(size) * (1.0 + kIrregularMargin);
  } else if (!known_->peaks.empty()) {
    // Activations grow no faster than the samples, so the largest peak per sample is a bound.
    const auto& [measured_size, measured_peak] = *known_->peaks.rbegin();
    const auto exact = known_->peaks.find(size);
    above = exact != known_->peaks.end()
                ? static_cast<double>(exact->second)
                : static_cast<double>(measured_peak) *
                      std::max(1.0, static_cast<double>(size) / static_cast<double>(measured_size));
    if (known_->irregular) above *= 1.0 + kIrregularMargin;
  }
  const int64_t peak = baseline + static_cast<int64_t>(std::ceil(above * correction(size)));
  return std::min(peak, measured_step(size).value_or(peak));
}

std::optional<int64_t> Planner::measured_step(int64_t size) const {
  if (known_->irregular) return std::nullopt;
  const auto found = known_->steps.find({request_.batch_size, size});
  if (found == known_->steps.end()) return std::nullopt;
  return request_.baseline_bytes + found->second;
}

double Planner::correction(int64_t size) const {
  if (!request_.measured || request_.two_pass || known_->ratios.empty()) return known_->correction;
  // What is once, or rounded, is a smaller share of a larger size: a factor falls with the size.
  const auto above = known_->ratios.upper_bound(size);
  return above == known_->ratios.begin() ? above->second : std::prev(above)->second;
}

int64_t Planner::simulated_peak(int64_t size) const {
  if (request_.two_pass) return two_pass_peak(size, /*retained=*/0);
  const int64_t baseline = request_.baseline_bytes;
  const auto simulate = [&](std::vector<int64_t> sizes) {
    return simulate_peak(stream_plan(std::move(sizes), false), *known_->profile, baseline);
  };
  const int64_t count = (request_.batch_size + size - 1) / size;
  constexpr int64_t kShort = 8;
  if (count <= kShort) return simulate(split_evenly(request_.batch_size, size));
  // From the second micro-batch on all are alike: what one leaves behind (kept outputs), all leave.
  const int64_t largest = even_size(request_.batch_size, size);
  const int64_t shorter = simulate(std::vector<int64_t>(kShort - 1, largest));
  const int64_t longer = simulate(std::vector<int64_t>(kShort, largest));
  return longer + (longer - shorter) * (count - kShort);
}

bool Planner::fits(int64_t size) const {
  return size <= known_->largest && !known_->failed.contains(size) &&
         predicted_peak(size) <= request_.budget_bytes;
}

/// Whether one micro-batch of `size` fits at the row at work. In a whole step the first
/// micro-batch, the largest of all, still finds no gradient buffers; in the middle of a step every
/// one does.
bool Planner::fits_here(int64_t size) const {
  if (row_ == 0 || !known_->profile) return true;
  const int64_t baseline = request_.baseline_bytes;
  const int64_t peak =
      simulate_peak(measured_plan({size}), *known_->profile, baseline, /*begun=*/true);
  const double above = std::ceil(static_cast<double>(peak - baseline) * correction(size));
  return baseline + static_cast<int64_t>(above) <= request_.budget_bytes;
}

/// The rows that are left, in the fastest size that fits here.
std::vector<int64_t> Planner::split_rest() const {
  int64_t size = size_under(fastest());
  while (size > 1 && !fits_here(size)) size -= (size + 31) / 32;
  return split_evenly(request_.batch_size - row_, size);
}

std::optional<int64_t> Planner::probe_size() const {
  const Knowledge& known = *known_;
  if (request_.fails_on > 0) {
    // A second pass, which cannot begin again, comes later: once in front of it.
    const std::vector<int64_t> sizes = candidates();
    if (!request_.two_pass || sizes.empty() || known.peaks.contains(sizes[0])) return std::nullopt;
    return sizes[0];
  }
  if (known.profile || known.irregular || request_.whole_batch_only || known.last_resort > 0) {
    return std::nullopt;
  }
  // Two samples first: they show what larger sizes need at most, and take what is taken only once.
  if (request_.measured && known.peaks.empty()) {
    return std::min({kSmallProbe, known.largest, request_.batch_size});
  }
  if (request_.batch_size < kSmallestProfiled) {
    // Too few for a profile: the whole batch first, then halves.
    return known.peaks.empty() ? std::optional(std::min(request_.batch_size, known.largest))
                               : std::nullopt;
  }
  // Where two samples do not fit there is nothing to compare: one is run to see what it needs.
  if (known.largest < kSmallProbe) {
    return known.peaks.contains(1) ? std::nullopt : std::optional<int64_t>(1);
  }
  const int64_t small = known.traces.empty() ? small_probe() : known.traces.front().size;
  const int64_t large = small * (kLargeProbe / kSmallProbe);
  if (request_.measured && !fits(known.traces.empty() ? small : large)) return std::nullopt;
  if (known.traces.empty()) return small;
  if (known.largest < large) return std::nullopt;
  // A third trace replaces the first, in which some kernels ran for the first time.
  return known.traces.size() == 1 ? large : small;
}

int64_t Planner::small_probe() const {
  int64_t size = kSmallProbe;
  if (!request_.measured) return size;
  while (4 * size <= kMostProbed && 16 * size <= request_.batch_size && fits(4 * size)) size *= 2;
  return size;
}

std::optional<int64_t> Planner::cap_to_time() const {
  const int64_t remaining = request_.batch_size - row_;
  // Where one micro-batch is the whole step the next step is the only way to time a warm one.
  if (row_ == 0 && last_cap_ > 0 && size_under(last_cap_) == remaining && fits(remaining) &&
      known_->timings.wants(last_cap_)) {
    return last_cap_;
  }
  std::optional<int64_t> found;
  int fewest = INT_MAX;
  for (const int64_t cap : candidates()) {
    const int pieces = known_->timings.pieces(cap);
    if (pieces >= fewest || size_under(cap) > remaining) continue;
    if (!known_->timings.wants(cap) || !fits_here(size_under(cap))) continue;
    found = cap;
    fewest = pieces;
  }
  return found;
}

int64_t Planner::timed_count(int64_t cap) const {
  const int64_t size = size_under(cap);
  if (request_.segments > 0) return 1;  // all micro-batches of a piece go together
  const int64_t count = known_->timings.count(cap, size, /*first=*/cap != last_cap_);
  return std::min(count, (request_.batch_size - row_) / size);
}

/// Whether a micro-batch of this size is the step that native takes: all samples, one forward.
bool Planner::stays_whole(int64_t size) const {
  return size >= request_.batch_size && (!request_.two_pass || most_retained(size) > 0);
}

int64_t Planner::fastest() const {
  const std::vector<int64_t> caps = candidates();
  int64_t best_cap = 0;
  double best = INFINITY;
  // From the largest on: how many graphs fit is soon said of few micro-batches.
  for (auto cap = caps.rbegin(); cap != caps.rend(); ++cap) {
    const Timings::Timing* timing = known_->timings.of(*cap);
    if (timing == nullptr) continue;
    if (request_.two_pass && timing->estimate(/*kept=*/1) > best) continue;  // whatever it keeps
    const int64_t size = size_under(*cap);
    const double favour = stays_whole(size) ? kWorthSplitting : 1;
    if (const double estimate = favour * timing->estimate(kept_share(size)); estimate <= best) {
      best = estimate;
      best_cap = *cap;
    }
  }
  if (best_cap > 0) return best_cap;
  // Nothing timed yet: the largest size that probes have shown to work, else the smallest that
  // fits.
  for (auto cap = caps.rbegin(); cap != caps.rend(); ++cap) {
    if (*cap <= kLargeProbe) return *cap;
  }
  return caps.empty() ? 1 : caps.front();
}

bool Planner::settled() const {
  if (settled_plan_) return true;  // asked in each step: without a simulation for each size
  if (known_ == nullptr || probe_size()) return false;
  const std::vector<int64_t> caps = candidates();
  return caps.size() == 1 || std::none_of(caps.begin(), caps.end(),
                                          [&](int64_t cap) { return known_->timings.wants(cap); });
}

bool Planner::settled_for(const Request& request) const {
  return settled_plan_ && !borrowed_ && is_alike(request, request_);
}

std::optional<Piece> Planner::next() {
  const int64_t remaining = request_.batch_size - row_;
  attempted_ = 0;
  if (remaining == 0) return std::nullopt;
  if (request_.two_pass && (settled_plan_ || settled())) return std::nullopt;
  Piece piece;
  std::vector<int64_t> sizes;
  if (row_ == 0 && settled_plan_) {
    piece.plan = *settled_plan_;
    piece.settled = true;
  } else if (const auto probe = probe_size()) {
    const auto count = static_cast<int64_t>(probed_micro_batches());
    // The next rehearsal begins with all rows again.
    if (count > 1 && remaining < *probe * count) return std::nullopt;
    sizes.assign(static_cast<size_t>(count), std::min(*probe, remaining));
    const bool first = request_.measured && known_->peaks.empty();
    piece.trace = !first && sizes.front() == *probe && *probe >= kSmallProbe &&
                  request_.batch_size >= kSmallestProfiled;
  } else if (settled()) {
    sizes = split_rest();
  } else {
    if (const auto cap = cap_to_time()) {
      sizes.assign(static_cast<size_t>(timed_count(*cap)), size_under(*cap));
      piece.timed_cap = *cap;
    }
    if (sizes.empty()) sizes = split_rest();
  }
  if (!sizes.empty()) {
    const bool last = std::accumulate(sizes.begin(), sizes.end(), row_) == request_.batch_size;
    if (request_.two_pass) {
      piece.plan = measured_plan(std::move(sizes));
    } else {
      piece.plan = stream_plan(std::move(sizes), last && request_.penalty);
      if (!last) piece.plan.instructions.pop_back();  // handed out once, at the end
    }
    if (row_ == 0 && last && known_->last_resort == 0 && settled()) {
      piece.plan.predicted_peak_bytes = predicted_peak(piece.plan.micro_batch_size());
      settled_plan_ = piece.plan;
    }
  }
  row_ += piece.plan.batch_size;
  attempted_ = piece.plan.micro_batch_size();
  return piece;
}

void Planner::observe(const Piece& piece, const Measurement& measured) {
  notice_lengths(piece, measured);
  if (borrowed_) return observe_borrowed(piece, measured);
  if (measured.whole_loss) {
    const bool one = piece.plan.micro_batch_sizes.size() == 1;
    const int64_t held = held_beside_joined(piece.plan);
    known_->whole_loss[{request_.batch_size, one}] = {measured.whole_loss->rise - held,
                                                      measured.whole_loss->net - held};
  }
  const bool whole_step =
      piece.plan.batch_size == request_.batch_size && piece.plan.strategy != "rehearsal";
  const bool last = row_ == request_.batch_size && piece.plan.strategy != "rehearsal";
  if (last) {
    known_->failed.clear();
    known_->last_resort = 0;
  }
  if (piece.settled) return;
  if (piece.plan.strategy == "replay" || piece.plan.strategy == "cut") {
    return observe_two_pass(piece, measured);
  }
  const int64_t size = piece.plan.micro_batch_size();
  // Workspace of a library, which stays: the next step finds it there when it begins.
  if (request_.measured && known_->peaks.empty()) request_.baseline_bytes += measured.lasting_bytes;
  const int64_t above = measured.peak_bytes - request_.baseline_bytes;
  int64_t& peak = known_->peaks[size];
  peak = std::max(peak, above);
  if (whole_step) known_->steps[{request_.batch_size, size}] = above;
  // In a rehearsal earlier pieces leave outputs behind that the simulation of one piece does not
  // know of; two_pass.cpp corrects by the step itself.
  if (known_->profile && !request_.two_pass) {
    const bool begun = row_ > piece.plan.batch_size;
    const int64_t predicted =
        simulate_peak(piece.plan, *known_->profile, request_.baseline_bytes, begun) -
        request_.baseline_bytes;
    if (predicted > 0 && request_.measured) {
      known_->ratios[size] = static_cast<double>(above) / static_cast<double>(predicted);
    } else if (predicted > 0) {
      known_->correction =
          std::max(known_->correction, static_cast<double>(above) / static_cast<double>(predicted));
    }
  }
  if (piece.timed_cap > 0) learn_times(piece, measured);
  last_cap_ = piece.timed_cap;
  if (measured.trace && !known_->ragged) learn(*measured.trace);
}

void Planner::learn_times(const Piece& piece, const Measurement& measured) {
  known_->timings.learn(piece.timed_cap,
                        {piece.plan.micro_batch_size(), measured.seconds, measured.again,
                         /*first=*/piece.timed_cap != last_cap_, known_->ragged, work_ratio_});
}

void Planner::learn(MicroBatchTrace trace) {
  std::vector<MicroBatchTrace>& traces = known_->traces;
  // The first of all shows which gradients become buffers, and may not be among those compared.
  if (!traces.empty()) trace.inherit(traces.back());
  traces.push_back(std::move(trace));
  if (traces.size() < 2) return;
  known_->profile = MicroBatchProfile::fit(
      traces[traces.size() - 2], traces.back(),
      steps_of(measured_plan(std::vector<int64_t>(probed_micro_batches(), traces.back().size))),
      request_.measured ? kRounding : 1);
  known_->irregular = !known_->profile && traces.size() > 2;
  if (known_->profile || known_->irregular) traces.clear();
}

void Planner::forget_settled_plan() {
  settled_plan_.reset();
  full_plan_.reset();
}

bool Planner::whole_batch_may_fit() const {
  return !request_.measured || fits(request_.batch_size);
}

}  // namespace infinitybatch
