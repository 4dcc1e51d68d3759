// Copies behind the caller's own work.
#include "memory/trace.hpp"
#include "offload/failure_injection.hpp"
#include "offload/store.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace infinitybatch::offload {
namespace {

using offload_test::Directory;
using offload_test::kCpu;
using offload_test::live;
using offload_test::Values;

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
  Offloaded offloaded = store.start_put(values.tensors);
  EXPECT_TRUE(offloaded.away());
  EXPECT_TRUE(values.same()) << "may be read while the copy runs";
  compute();
  EXPECT_EQ(live(), before) << "freed by whom it may concern, not by the copy";
  EXPECT_EQ(store.statistics().moved_out, 0);
  {
    const memory::AllocationTrace trace(kCpu);
    offloaded.finish_put();
    ASSERT_EQ(trace.events().size(), 1);
    EXPECT_EQ(trace.events()[0].bytes, -kBytes);
  }
  EXPECT_EQ(live(), before - kBytes);
  EXPECT_EQ(store.statistics().moved_out, kBytes);
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  EXPECT_NO_THROW(offloaded.finish_put()) << "nothing is leaving";
  offloaded.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Background, PrefetchAllocatesInTheCallersThread) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  const int64_t before = live();
  Offloaded offloaded = store.put(values.tensors);
  {
    const memory::Limit limit(before - 1);
    EXPECT_THROW(offloaded.prefetch(), c10::OutOfMemoryError);
    EXPECT_EQ(live(), before - kBytes);
  }
  const memory::Limit limit(before);
  offloaded.prefetch();
  EXPECT_EQ(live(), before);
  EXPECT_NO_THROW(offloaded.prefetch()) << "it is on its way";
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error) << "not back yet";
  compute();
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  offloaded.bring_back();
  EXPECT_TRUE(values.same());
  EXPECT_EQ(live(), before);
}

TEST(Background, WhatComputationHidesIsTold) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  Offloaded offloaded = store.start_put(values.tensors);
  compute();
  offloaded.finish_put();
  StoreStatistics statistics = store.statistics();
  EXPECT_GE(statistics.seconds_copying, 0.99 * kSeconds);
  EXPECT_GE(statistics.seconds_hidden, kSeconds / 2);
  EXPECT_LE(statistics.seconds_waited, kSeconds / 2);
  offloaded.prefetch();
  compute();
  offloaded.bring_back();
  EXPECT_GE(store.statistics().seconds_hidden, statistics.seconds_hidden + kSeconds / 2);
}

TEST(Background, WhatItDoesNotHideIsToldToo) {
  Values values({kBytes});
  Store store(kCpu, slow_link());
  Offloaded offloaded = store.start_put(values.tensors);
  offloaded.finish_put();
  offloaded.prefetch();
  offloaded.bring_back();
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
  Offloaded offloaded = store.start_put(values.tensors);
  const std::chrono::duration<double> started = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(started.count(), kSeconds) << "does not wait for the copy";
  offloaded.finish_put();
  const std::chrono::duration<double> finished = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(finished.count(), kSeconds);
}

TEST(Background, SeveralAtATimeInOrder) {
  const Directory directory;
  Store store(kCpu, {.host_bytes = 3 << 20, .file = {directory.path()}});
  std::vector<Values> values;
  for (int i = 0; i < 6; ++i) values.emplace_back(std::vector<int64_t>{1'000'000 + i, 7, 300'000});
  std::vector<Offloaded> offloaded;
  for (size_t i = 0; i < values.size(); ++i) {
    offloaded.push_back(i % 3 == 2 ? store.put(values[i].tensors)
                                   : store.start_put(values[i].tensors));
  }
  for (size_t i = values.size(); i-- > 0;) offloaded[i].prefetch();
  for (size_t i = 0; i < values.size(); ++i) {
    offloaded[i].bring_back();
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
  Offloaded offloaded = store.start_put(values.tensors);
  EXPECT_THROW(offloaded.finish_put(), OffloadError);
  EXPECT_FALSE(offloaded.away());
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
  Offloaded offloaded = store.start_put(values.tensors);
  offloaded.finish_put();
  {
    const FailDisk failure(1, EIO);
    offloaded.prefetch();
    EXPECT_THROW(offloaded.bring_back(), OffloadError);
    EXPECT_TRUE(failure.failed());
  }
  EXPECT_TRUE(offloaded.away());
  EXPECT_EQ(live(), before - values.total()) << "nothing stays allocated";
  EXPECT_THROW((void)values.tensors[0].sum(), c10::Error);
  offloaded.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Background, GivenUpOnTheWay) {
  Values values({kBytes});
  Values others({kBytes});
  const int64_t before = live();
  {
    Store store(kCpu, {.host_bytes = 16 << 20, .disk = false, .bandwidth = kBytes / kSeconds});
    Offloaded leaving = store.start_put(values.tensors);
    Offloaded moved = std::move(leaving);
    Offloaded returning = store.put(others.tensors);
    returning.prefetch();
    EXPECT_EQ(live(), before);
    moved = Offloaded();
    EXPECT_TRUE(values.same()) << "its memory was still there";
    returning = Offloaded();
    EXPECT_EQ(live(), before - kBytes) << "this one's is gone";
    EXPECT_EQ(store.statistics().host_bytes, 0);
  }
  Offloaded outlives;
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
  Offloaded offloaded = store.start_put(values->tensors);
  values.reset();
  offloaded.finish_put();
  EXPECT_EQ(live(), before - kBytes);
  offloaded.prefetch();
  offloaded.bring_back();
  EXPECT_EQ(live(), before - kBytes);
  EXPECT_FALSE(offloaded.away());
}

}  // namespace
}  // namespace infinitybatch::offload
