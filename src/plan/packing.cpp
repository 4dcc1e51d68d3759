#include "plan/packing.hpp"

#include "execute/schedule.hpp"
#include "execute/simulator.hpp"
#include "plan/plans.hpp"

#include <algorithm>
#include <cmath>

namespace infinitybatch::plan {
namespace {

// Lengths of a batch whose micro-batches are simulated; others count as the next longer one.
constexpr int64_t kGrains = 64;
// Two numbers of rows tell what a row takes. The peak is a maximum of lines, and plans are
// simulated as they are: this only says where one micro-batch ends and the next begins.
constexpr int64_t kFew = 2;
constexpr int64_t kMany = 8;
// Rounding of a division.
constexpr double kClose = 1e-9;

AffineBytes bytes_of(const Request& request, const MicroBatchProfile& profile, int64_t length) {
  const auto peak = [&](int64_t rows) {
    Plan plan = measured_plan(request, {rows});
    plan.lengths = {length};
    return static_cast<double>(simulate_peak(plan, profile, /*baseline=*/0, /*begun=*/true));
  };
  const double few = peak(kFew);
  const double each = std::max(1.0, (peak(kMany) - few) / static_cast<double>(kMany - kFew));
  return {few - static_cast<double>(kFew) * each, each};
}

}  // namespace

Packing::Packing(const Request& request, const MicroBatchProfile& profile)
    : alike_(request.lengths.front() == request.lengths.back()),
      reference_(bytes_of(request, profile, profile.length())) {
  const std::vector<int64_t>& lengths = request.lengths;
  const int64_t longest = lengths.front();
  const int64_t grain = std::max<int64_t>(1, (longest - lengths.back()) / kGrains);
  int64_t told = 0;
  for (const int64_t length : lengths) {
    const int64_t counted = longest - (longest - length) / grain * grain;
    if (by_row_.empty() || counted != told) {
      by_row_.push_back(bytes_of(request, profile, counted));
    } else {
      by_row_.push_back(by_row_.back());
    }
    told = counted;
  }
}

std::vector<int64_t> Packing::split(int64_t row, int64_t size) const {
  const double bytes = reference_.at(static_cast<double>(size) / kUnit);
  const auto end = static_cast<int64_t>(by_row_.size());
  if (alike_) return split_evenly(end - row, fit(row, bytes));
  std::vector<int64_t> ends{row};
  while (ends.back() < end) ends.push_back(ends.back() + fit(ends.back(), bytes));
  shift(ends, bytes);
  std::vector<int64_t> sizes;
  for (size_t i = 1; i < ends.size(); ++i) sizes.push_back(ends[i] - ends[i - 1]);
  return sizes;
}

int64_t Packing::fit(int64_t row, double bytes) const {
  const AffineBytes& here = by_row_[static_cast<size_t>(row)];
  const double rows = std::floor((bytes - here.fixed) / here.per_sample + kClose);
  const auto left = static_cast<double>(std::ssize(by_row_) - row);
  return static_cast<int64_t>(std::clamp(rows, 1.0, left));
}

void Packing::shift(std::vector<int64_t>& ends, double bytes) const {
  const auto work = [&](int64_t begin, int64_t end) {
    return static_cast<double>(end - begin) * by_row_[static_cast<size_t>(begin)].per_sample;
  };
  for (size_t i = ends.size() - 1; i-- > 1;) {
    const int64_t begin = ends[i - 1];
    const int64_t end = ends[i + 1];
    double least = work(begin, ends[i]) + work(ends[i], end);
    for (int64_t here = ends[i] - 1; here > begin && end - here <= fit(here, bytes); --here) {
      const double found = work(begin, here) + work(here, end);
      if (found >= least) continue;
      least = found;
      ends[i] = here;
    }
  }
}

int64_t Packing::size_of(int64_t row, int64_t rows) const {
  const AffineBytes& here = by_row_[static_cast<size_t>(row)];
  const double equal =
      (here.at(static_cast<double>(rows)) - reference_.fixed) / reference_.per_sample;
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(equal * kUnit - kClose)));
}

double Packing::work(int64_t row, int64_t rows) const {
  const double each = by_row_[static_cast<size_t>(row)].per_sample / reference_.per_sample;
  return std::max(1e-6, each * static_cast<double>(rows));
}

}  // namespace infinitybatch::plan
