// What waits leaves while others may still hold it, and comes back as it was last.
#include "execute/waiting_room.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

constexpr tape::Crossing kWhole{0, 0};
constexpr tape::Crossing kAlias{1, 0};

offload::Store store() {
  offload::StoreOptions options;
  options.host_bytes = 1 << 20;
  options.disk = false;
  return offload::Store(at::kCPU, options);
}

/// A tensor and a view of it.
struct Room {
  Room() {
    waiting[kWhole] = at::arange(8, at::kDouble);
    waiting[kAlias] = waiting[kWhole].narrow(0, 2, 4);
  }
  WaitingRoom waiting;
};

TEST(WaitingRoom, AStorageAndItsAliasesLeaveOnceAndComeBack) {
  offload::Store store = infinitybatch::store();
  Room room;
  const int64_t live = memory::stats(at::kCPU).live;
  room.waiting.copy_out(store, /*giver=*/0);
  room.waiting.finish_leaving(store);
  EXPECT_EQ(memory::stats(at::kCPU).live, live - 64);
  EXPECT_EQ(store.statistics().moved_out, 64);
  EXPECT_TRUE(at::equal(room.waiting.at(kAlias), at::arange(2, 6, at::kDouble)));
  EXPECT_TRUE(at::equal(room.waiting.at(kWhole), at::arange(8, at::kDouble)));
  EXPECT_TRUE(room.waiting.at(kWhole).is_alias_of(room.waiting.at(kAlias)));
  EXPECT_EQ(store.statistics().moved_back, 64);
}

TEST(WaitingRoom, WhatIsWrittenAfterItsCopyBeganIsCopiedAnew) {
  offload::Store store = infinitybatch::store();
  // Each raises the version of both, by way of either.
  for (const tape::Crossing written : {kWhole, kAlias}) {
    Room room;
    room.waiting.copy_out(store, /*giver=*/0);
    room.waiting.at(written).mul_(-1);
    const at::Tensor expected = room.waiting.at(kWhole).clone();
    room.waiting.finish_leaving(store);
    EXPECT_TRUE(at::equal(room.waiting.at(kWhole), expected));
  }
  EXPECT_EQ(store.statistics().host_bytes, 0);
}

TEST(WaitingRoom, WhatSomebodyElseHoldsStaysUntilTheNextTime) {
  offload::Store store = infinitybatch::store();
  Room room;
  const int64_t live = memory::stats(at::kCPU).live;
  at::Tensor graph = room.waiting.at(kAlias).detach();
  room.waiting.copy_out(store, /*giver=*/0);
  room.waiting.finish_leaving(store);
  EXPECT_EQ(memory::stats(at::kCPU).live, live);
  EXPECT_EQ(graph[0].item<double>(), 2);
  graph.reset();
  room.waiting.finish_leaving(store);
  EXPECT_EQ(memory::stats(at::kCPU).live, live - 64);
  EXPECT_TRUE(at::equal(room.waiting.at(kWhole), at::arange(8, at::kDouble)));
}

}  // namespace
}  // namespace infinitybatch
