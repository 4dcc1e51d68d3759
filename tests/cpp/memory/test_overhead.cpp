#include "support.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace infinitybatch::memory {
namespace {

double nanoseconds_each(c10::Allocator& allocator, size_t bytes, int times) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) {
    const c10::DataPtr data = allocator.allocate(bytes);
    *static_cast<volatile char*>(data.get()) = 1;
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / times;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

constexpr int kTimes = 500;
constexpr int kRounds = 41;
constexpr int kLeastRounds = 7;
constexpr double kSeconds = 5;  // for each size: with a sanitizer an allocation takes milliseconds

// Printed for people; the bound only catches a lock or a system call that has crept in. Where the
// allocation itself takes long a tenth of it is lost in the noise.
TEST(Overhead, OfAnAllocationAndItsFree) {
  std::printf(
      "bytes     torch's own   counting   difference (ns for an allocation and its free)\n");
  for (const size_t bytes : {size_t{64}, size_t{4096}, size_t{1} << 20}) {
    std::vector<double> own;
    std::vector<double> counting;
    std::vector<double> difference;
    double spent = 0;
    for (int round = 0; round < kRounds && (round < kLeastRounds || spent < kSeconds); ++round) {
      own.push_back(nanoseconds_each(*c10::GetDefaultCPUAllocator(), bytes, kTimes));
      counting.push_back(nanoseconds_each(*c10::GetCPUAllocator(), bytes, kTimes));
      difference.push_back(counting.back() - own.back());
      spent += (own.back() + counting.back()) * kTimes * 1e-9;
    }
    std::printf("%-9zu %11.1f %10.1f %12.1f\n", bytes, median(own), median(counting),
                median(difference));
    EXPECT_LT(median(difference), std::max(2000.0, median(own) / 10)) << bytes;
  }
}

}  // namespace
}  // namespace infinitybatch::memory
