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

// Printed for people; the bound only catches a lock or a system call that has crept in.
TEST(Overhead, OfAnAllocationAndItsFree) {
  std::printf(
      "bytes     torch's own   counting   difference (ns for an allocation and its free)\n");
  for (const size_t bytes : {size_t{64}, size_t{4096}, size_t{1} << 20}) {
    std::vector<double> own;
    std::vector<double> counting;
    std::vector<double> difference;
    for (int round = 0; round < 41; ++round) {
      own.push_back(nanoseconds_each(*c10::GetDefaultCPUAllocator(), bytes, 2000));
      counting.push_back(nanoseconds_each(*c10::GetCPUAllocator(), bytes, 2000));
      difference.push_back(counting.back() - own.back());
    }
    std::printf("%-9zu %11.1f %10.1f %12.1f\n", bytes, median(own), median(counting),
                median(difference));
    EXPECT_LT(median(difference), 2000.0) << bytes;
  }
}

}  // namespace
}  // namespace infinitybatch::memory
