#pragma once

#include <algorithm>
#include <ctime>
#include <vector>

namespace infinitybatch {

/// CPU time of the calling thread in nanoseconds: other work on the machine takes none of it.
inline double thread_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

/// What code takes that is not disturbed; caches that other work has emptied make the rest.
inline double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

}  // namespace infinitybatch
