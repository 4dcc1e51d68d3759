#include "support.hpp"

#include "support/thread_time.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace infinitybatch::memory {
namespace {

double nanoseconds_each(c10::Allocator& allocator, size_t bytes, int times) {
  const double start = thread_nanoseconds();
  for (int i = 0; i < times; ++i) {
    const c10::DataPtr data = allocator.allocate(bytes);
    *static_cast<volatile char*>(data.get()) = 1;
  }
  return (thread_nanoseconds() - start) / times;
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
    double spent = 0;
    for (int round = 0; round < kRounds && (round < kLeastRounds || spent < kSeconds); ++round) {
      own.push_back(nanoseconds_each(*c10::GetDefaultCPUAllocator(), bytes, kTimes));
      counting.push_back(nanoseconds_each(*c10::GetCPUAllocator(), bytes, kTimes));
      spent += (own.back() + counting.back()) * kTimes * 1e-9;
    }
    const double difference = least(counting) - least(own);
    std::printf("%-9zu %11.1f %10.1f %12.1f\n", bytes, least(own), least(counting), difference);
    EXPECT_LT(difference, std::max(2000.0, least(own) / 10)) << bytes;
  }
}

}  // namespace
}  // namespace infinitybatch::memory
