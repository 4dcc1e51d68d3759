#pragma once

#include <cstdint>

namespace infinitybatch::plan {

/// By bisection, the largest number in [low, high) of which `fits` is true. It is taken to be true
/// of `low`, and of no number behind one of which it is false.
template <typename Fits>
int64_t largest(int64_t low, int64_t high, const Fits& fits) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace infinitybatch::plan
