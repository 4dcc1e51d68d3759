// Copies behind the caller's own work.
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/trace.hpp>
#include <infinitybatch/park/failure_injection.hpp>
#include <infinitybatch/park/store.hpp>

#include "support.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace infinitybatch::park {
namespace {

using park_test::Directory;
using park_test::kCpu;
using park_test::live;
using park_test::Values;

constexpr int64_t kBytes = 5'000'000;
constexpr double kSeconds = 0.2;  // of a copy of so many bytes over the link

StoreOptions slow_link() {
  return {.host_bytes = 8 << 20, .disk = false, .bandwidth = kBytes / kSeconds};
}

void compute() {
  std::this_thread::sleep_for(std::chrono::duration<double>(3 * kSeconds));
}

TEST(Background, MemoryIsFreeWhenThePutIsFinished) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  const int64_t before = live();
  Parked parked = store.start_put(values.tensors);
  EXPECT_TRUE(parked.away());
  EXPECT_TRUE(values.same()) << "may be read while the copy runs";
  compute();
  EXPECT_EQ(live(), before) << "freed by whom it may concern, not by the copy";
  EXPECT_EQ(store.statistics().moved_out, 0);
  {
    const memory::AllocationTrace trace(kCpu);
    parked.finish_put();
    ASSERT_EQ(trace.events().size(), 1);
    EXPECT_EQ(trace.events()[0].bytes, -kBytes);
  }
  EXPECT_EQ(live(), before - kBytes);
  EXPECT_EQ(store.statistics().moved_out, kBytes);
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  EXPECT_NO_THROW(parked.finish_put()) << "nothing is leaving";
  parked.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Background, PrefetchAllocatesInTheCallersThread) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  const int64_t before = live();
  Parked parked = store.put(values.tensors);
  {
    const memory::Limit limit(before - 1);
    EXPECT_THROW(parked.prefetch(), c10::OutOfMemoryError);
    EXPECT_EQ(live(), before - kBytes);
  }
  const memory::Limit limit(before);
  parked.prefetch();
  EXPECT_EQ(live(), before);
  EXPECT_NO_THROW(parked.prefetch()) << "it is on its way";
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error) << "not back yet";
  compute();
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  parked.bring_back();
  EXPECT_TRUE(values.same());
  EXPECT_EQ(live(), before);
}

TEST(Background, WhatComputationHidesIsTold) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  Parked parked = store.start_put(values.tensors);
  compute();
  parked.finish_put();
  StoreStatistics statistics = store.statistics();
  EXPECT_GE(statistics.seconds_copying, 0.99 * kSeconds);
  EXPECT_GE(statistics.seconds_hidden, kSeconds / 2);
  EXPECT_LE(statistics.seconds_waited, kSeconds / 2);
  parked.prefetch();
  compute();
  parked.bring_back();
  EXPECT_GE(store.statistics().seconds_hidden, statistics.seconds_hidden + kSeconds / 2);
}

TEST(Background, WhatItDoesNotHideIsToldToo) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  Parked parked = store.start_put(values.tensors);
  parked.finish_put();
  parked.prefetch();
  parked.bring_back();
  const StoreStatistics statistics = store.statistics();
  EXPECT_GE(statistics.seconds_waited, kSeconds);
  EXPECT_NEAR(statistics.seconds_waited + statistics.seconds_hidden, statistics.seconds_copying,
              kSeconds / 4)
      << "but for waking up";
  EXPECT_TRUE(values.same());
}

TEST(Background, CopiesOverlapWithComputation) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  store.start_put(values.tensors).bring_back();  // starts the thread
  const auto begin = std::chrono::steady_clock::now();
  Parked parked = store.start_put(values.tensors);
  const std::chrono::duration<double> started = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(started.count(), kSeconds) << "does not wait for the copy";
  parked.finish_put();
  const std::chrono::duration<double> finished = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(finished.count(), kSeconds);
}

TEST(Background, SeveralAtATimeInOrder) {
  const Directory directory;
  Store store(kCpu, {.host_bytes = 3 << 20, .file = {directory.path()}});
  std::vector<Values> values;
  for (int i = 0; i < 6; ++i) values.emplace_back(std::vector<int64_t>{1'000'000 + i, 7, 300'000});
  std::vector<Parked> parked;
  for (size_t i = 0; i < values.size(); ++i) {
    parked.push_back(i % 3 == 2 ? store.put(values[i].tensors)
                                : store.start_put(values[i].tensors));
  }
  for (size_t i = values.size(); i-- > 0;) parked[i].prefetch();
  for (size_t i = 0; i < values.size(); ++i) {
    parked[i].bring_back();
    EXPECT_TRUE(values[i].same()) << i;
  }
  EXPECT_GT(store.statistics().disk_peak, 0);
  EXPECT_EQ(store.statistics().host_bytes + store.statistics().disk_bytes, 0);
}

TEST(Background, AFailedPutIsToldWhenItIsFinished) {
  Values values({kBytes, 3'000});
  const Directory directory;
  Store store(kCpu, {.host_bytes = 1 << 20, .file = {directory.path()}});
  const int64_t before = live();
  const FailDisk failure(1, ENOSPC);
  Parked parked = store.start_put(values.tensors);
  EXPECT_THROW(parked.finish_put(), ParkingError);
  EXPECT_FALSE(parked.away());
  EXPECT_EQ(live(), before);
  EXPECT_TRUE(values.same());
  EXPECT_EQ(store.statistics().host_bytes + store.statistics().disk_bytes, 0);
  EXPECT_EQ(store.statistics().moved_out, 0);
}

TEST(Background, AFailedReturnMayBeTriedAgain) {
  Values values({kBytes, 3'000});
  const Directory directory;
  Store store(kCpu, {.file = {directory.path()}});
  const int64_t before = live();
  Parked parked = store.start_put(values.tensors);
  parked.finish_put();
  {
    const FailDisk failure(1, EIO);
    parked.prefetch();
    EXPECT_THROW(parked.bring_back(), ParkingError);
    EXPECT_TRUE(failure.failed());
  }
  EXPECT_TRUE(parked.away());
  EXPECT_EQ(live(), before - values.total()) << "nothing stays allocated";
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  parked.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Background, GivenUpOnTheWay) {
  Values values({kBytes});
  Values others({kBytes});
  const int64_t before = live();
  {
    Store store(kCpu, {.host_bytes = 16 << 20, .disk = false, .bandwidth = kBytes / kSeconds});
    Parked leaving = store.start_put(values.tensors);
    Parked moved = std::move(leaving);
    Parked returning = store.put(others.tensors);
    returning.prefetch();
    EXPECT_EQ(live(), before);
    moved = Parked();
    EXPECT_TRUE(values.same()) << "its memory was still there";
    returning = Parked();
    EXPECT_EQ(live(), before - kBytes) << "this one's is gone";
    EXPECT_EQ(store.statistics().host_bytes, 0);
  }
  Parked outlives;
  {
    Store store(kCpu, slow_link());
    outlives = store.start_put(values.tensors);
  }
  outlives.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Background, TensorsMayDieOnTheWay) {
  auto values = std::make_unique<Values>(std::vector<int64_t>{kBytes});
  Store store(kCpu, slow_link());
  const int64_t before = live();
  Parked parked = store.start_put(values->tensors);
  values.reset();
  parked.finish_put();
  EXPECT_EQ(live(), before - kBytes);
  parked.prefetch();
  parked.bring_back();
  EXPECT_EQ(live(), before - kBytes);
  EXPECT_FALSE(parked.away());
}

}  // namespace
}  // namespace infinitybatch::park
