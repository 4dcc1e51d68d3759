#include "memory/trace.hpp"
#include "support.hpp"

#include <infinitybatch/memory/limit.hpp>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::kCpu;
using memory_test::live;
using memory_test::SmallNetwork;

int64_t sum(const std::vector<AllocationEvent>& events) {
  return std::accumulate(events.begin(), events.end(), int64_t{0},
                         [](int64_t total, const AllocationEvent& e) { return total + e.bytes; });
}

TEST(AllocationTrace, RecordsAllocationsAndFreesInOrder) {
  const AllocationTrace trace(kCpu);
  const void* first = nullptr;
  const void* second = nullptr;
  {
    const at::Tensor a = block(100);
    first = a.data_ptr();
    const at::Tensor b = block(200);
    second = b.data_ptr();
  }
  const auto& events = trace.events();
  ASSERT_EQ(events.size(), 4);
  EXPECT_EQ(events[0].address, first);
  EXPECT_EQ(events[0].bytes, 100);
  EXPECT_EQ(events[1].address, second);
  EXPECT_EQ(events[1].bytes, 200);
  EXPECT_EQ(events[2].address, second);
  EXPECT_EQ(events[2].bytes, -200);
  EXPECT_EQ(events[3].address, first);
  EXPECT_EQ(events[3].bytes, -100);
}

TEST(AllocationTrace, RecordsTheFreeOfABlockFromBefore) {
  at::Tensor earlier = block(123);
  const void* address = earlier.data_ptr();
  const AllocationTrace trace(kCpu);
  earlier.reset();
  ASSERT_EQ(trace.events().size(), 1);
  EXPECT_EQ(trace.events()[0].address, address);
  EXPECT_EQ(trace.events()[0].bytes, -123);
}

TEST(AllocationTrace, OfForwardAndBackwardGivesThePeak) {
  SmallNetwork network;
  network.step();
  const int64_t before = live();
  const PeakScope scope(kCpu);
  const AllocationTrace trace(kCpu);
  std::vector<at::Tensor> gradients = network.step();
  const size_t of_step = trace.events().size();
  EXPECT_EQ(sum(trace.events()), live() - before);
  EXPECT_EQ(sum(trace.events()), (24 * 40 + 24 + 10 * 24 + 10) * 4) << "the gradients are left";

  int64_t level = before;
  int64_t peak = before;
  std::map<const void*, int64_t> blocks;
  for (const AllocationEvent& event : trace.events()) {
    level += event.bytes;
    peak = std::max(peak, level);
    if ((blocks[event.address] += event.bytes) == 0) blocks.erase(event.address);
  }
  EXPECT_EQ(peak, scope.peak());
  EXPECT_EQ(blocks.size(), 4) << "frees name the block that was allocated";
  gradients.clear();
  EXPECT_EQ(trace.events().size(), of_step + 4);
}

TEST(AllocationTrace, EndsWithItsScope) {
  at::Tensor tensor;
  {
    const AllocationTrace trace(kCpu);
    tensor = block(10);
    EXPECT_EQ(trace.events().size(), 1);
  }
  EXPECT_NO_THROW(tensor.reset());
  const AllocationTrace later(kCpu);
  EXPECT_TRUE(later.events().empty());
}

TEST(AllocationTrace, NestedTracesBothSee) {
  const AllocationTrace outer(kCpu);
  const at::Tensor a = block(1);
  {
    const AllocationTrace inner(kCpu);
    const at::Tensor b = block(2);
    EXPECT_EQ(inner.events().size(), 1);
  }
  EXPECT_EQ(outer.events().size(), 3);
}

TEST(AllocationTrace, SeesThisThreadOnly) {
  const AllocationTrace trace(kCpu);
  std::thread([] { const at::Tensor tensor = block(10); }).join();
  EXPECT_TRUE(trace.events().empty());
}

TEST(AllocationTrace, LeavesLimitAndScopeInForce) {
  const int64_t base = live();
  const Limit limit(base + 100);
  const PeakScope scope(kCpu);
  {
    const AllocationTrace trace(kCpu);
    {
      const at::Tensor tensor = block(90);
    }
    EXPECT_THROW(block(101), c10::OutOfMemoryError);
    EXPECT_EQ(trace.events().size(), 2) << "a refused allocation is no event";
  }
  EXPECT_EQ(scope.peak(), base + 90);
  EXPECT_THROW(block(101), c10::OutOfMemoryError);
}

TEST(AllocationTrace, WorksBesideTorchsProfiler) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, false,
                                        /*profile_memory=*/true);
  const std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  SmallNetwork network;
  std::vector<AllocationEvent> events;
  {
    const AllocationTrace trace(kCpu);
    network.step();
    {
      const at::Tensor tensor = block(98765);
    }
    events = trace.events();
  }
  const auto result = profiler::disableProfiler();
  EXPECT_GT(events.size(), 20);
  EXPECT_EQ(events.back().bytes, -98765);
  int64_t seen_by_profiler = 0;
  for (const profiler::KinetoEvent& event : result->events()) {
    if (event.name() == "[memory]" && std::abs(event.nBytes()) == 98765) ++seen_by_profiler;
  }
  EXPECT_EQ(seen_by_profiler, 2);
}

}  // namespace
}  // namespace infinitybatch::memory
