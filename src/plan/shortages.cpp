#include "plan/shortages.hpp"

#include "plan/probes.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::plan {

bool is_time_to_try_again(int64_t calm, int64_t shortages) {
  constexpr int64_t kFirst = 16;
  constexpr int64_t kMostDoublings = 20;
  return calm > kFirst << std::clamp<int64_t>(shortages - 1, 0, kMostDoublings);
}

void Shortages::lower(int64_t& ceiling, int64_t to) {
  ceiling = std::min(ceiling, to);
  ++shortages_;
  calm_ = 0;
}

void Shortages::tell_in_parts(int64_t parts) {
  if (largest_ != INT64_MAX) largest_ = (largest_ + 1) * parts - 1;
  failed_.clear();
}

bool Shortages::fail(int64_t size) {
  if (size <= kSmallProbe) failed_.insert(size);
  return size > 1 && std::exchange(last_resort_, 0) == 0;
}

bool Shortages::find_last_resort(const Request& request) {
  // What passes the budget of a device that refuses nothing has passed it; and a second pass, or
  // sizes of which forward fails, are no streaming step, which begins again wherever memory ends.
  if (request.measured || request.two_pass || request.fails_on > 0) return false;
  for (const int64_t cap : {kSmallProbe, int64_t{1}}) {
    const int64_t size = request.size_under(cap);
    if (failed_.contains(size)) continue;
    last_resort_ = size;
    largest_ = std::max(largest_, size);
    return true;
  }
  return false;
}

void Shortages::end_step() {
  failed_.clear();
  last_resort_ = 0;
}

void Shortages::end_refused_step() {
  end_step();
  largest_ = std::max(largest_, kSmallProbe);
}

bool Shortages::may_try_again() {
  if (std::min(largest_, most_kept_) == INT64_MAX) return false;
  if (!is_time_to_try_again(++calm_, shortages_)) return false;
  largest_ = most_kept_ = INT64_MAX;
  return true;
}

}  // namespace infinitybatch::plan
