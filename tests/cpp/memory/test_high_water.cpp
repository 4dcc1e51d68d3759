// Peaks of stretches that overlap, and that end elsewhere than they began.
#include "memory/high_water.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace infinitybatch::memory {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

void touch(int64_t bytes) {
  at::empty({bytes}, at::kByte);
}

TEST(HighWater, StretchesOverlapInAnyOrder) {
  const int64_t live = stats(at::kCPU).live;
  auto first = std::make_unique<HighWater>(at::kCPU);
  touch(kMiB);
  auto second = std::make_unique<HighWater>(at::kCPU);
  EXPECT_EQ(first->peak(), live + kMiB);
  EXPECT_EQ(second->peak(), live);
  touch(2 * kMiB);
  EXPECT_EQ(second->peak(), live + 2 * kMiB);
  EXPECT_EQ(first->peak(), live + 2 * kMiB);
  first.reset();
  touch(3 * kMiB);
  EXPECT_EQ(second->peak(), live + 3 * kMiB);
}

TEST(HighWater, BesidePeakScopes) {
  const int64_t live = stats(at::kCPU).live;
  const PeakScope outer(at::kCPU);
  const HighWater mark(at::kCPU);
  {
    const PeakScope inner(at::kCPU);
    touch(kMiB);
    EXPECT_EQ(inner.peak(), live + kMiB);
  }
  const PeakScope after(at::kCPU);
  touch(kMiB / 2);
  EXPECT_EQ(after.peak(), live + kMiB / 2);
  EXPECT_EQ(mark.peak(), live + kMiB);
  EXPECT_EQ(outer.peak(), live + kMiB);
}

TEST(HighWater, WhatHappensInAPauseRaisesTheOthersAlone) {
  const int64_t live = stats(at::kCPU).live;
  const HighWater other(at::kCPU);
  const HighWater mark(at::kCPU);
  touch(kMiB);
  {
    const HighWater::Pause pause(&mark);
    const HighWater::Pause nothing(nullptr);
    const HighWater within(at::kCPU);
    touch(3 * kMiB);
    EXPECT_EQ(mark.peak(), live + kMiB);
    EXPECT_EQ(within.peak(), live + 3 * kMiB);
  }
  EXPECT_EQ(mark.peak(), live + kMiB);
  EXPECT_EQ(other.peak(), live + 3 * kMiB);
  touch(2 * kMiB);
  EXPECT_EQ(mark.peak(), live + 2 * kMiB);
}

TEST(HighWater, EndsInAnotherThread) {
  const int64_t live = stats(at::kCPU).live;
  auto mark = std::make_unique<HighWater>(at::kCPU);
  touch(kMiB);
  EXPECT_EQ(mark->peak(), live + kMiB);
  std::thread([&] {
    touch(4 * kMiB);  // not of the thread that made it
    EXPECT_EQ(mark->peak(), live + kMiB);
    mark.reset();
  }).join();
  touch(kMiB);
  const HighWater next(at::kCPU);
  EXPECT_EQ(next.peak(), live);
}

}  // namespace
}  // namespace infinitybatch::memory
