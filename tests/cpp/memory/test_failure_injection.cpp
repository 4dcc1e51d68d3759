#include "memory/failure_injection.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <gtest/gtest.h>

#include <thread>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::DefaultAllocatorInForce;
using memory_test::live;
using memory_test::SmallNetwork;

TEST(FailAllocation, FailsTheNthAndOnlyThat) {
  FailAllocation failure(3);
  EXPECT_NO_THROW(block(8));
  EXPECT_NO_THROW(at::empty({0}, at::kFloat)) << "empty allocations do not count";
  EXPECT_NO_THROW(block(8));
  EXPECT_FALSE(failure.failed());
  EXPECT_THROW(block(8), c10::OutOfMemoryError);
  EXPECT_TRUE(failure.failed());
  EXPECT_NO_THROW(block(8));
  EXPECT_EQ(failure.seen(), 4);
}

TEST(FailAllocation, EndsWithItsScope) {
  {
    const FailAllocation failure(1);
  }
  EXPECT_NO_THROW(block(8));
}

TEST(FailAllocation, LeavesTheLimitInForce) {
  const Limit limit(live() + 100);
  {
    const FailAllocation failure(2);
    EXPECT_THROW(block(101), c10::OutOfMemoryError);
    EXPECT_EQ(failure.seen(), 1) << "an allocation over the limit was asked for too";
    EXPECT_THROW(block(1), c10::OutOfMemoryError);
    EXPECT_NO_THROW(block(100));
  }
  EXPECT_THROW(block(101), c10::OutOfMemoryError);
}

TEST(FailAllocation, LeavesOtherThreadsAlone) {
  const FailAllocation failure(1);
  std::thread([] { EXPECT_NO_THROW(block(8)); }).join();
  EXPECT_EQ(failure.seen(), 0);
}

TEST(FailAllocation, RefusesMisuse) {
  EXPECT_THROW(FailAllocation(0), InvalidArgument);
  EXPECT_THROW(FailAllocation(-4), InvalidArgument);
  const FailAllocation first(FailAllocation::kNever);
  EXPECT_THROW(FailAllocation(1), StateError);
  EXPECT_NO_THROW(block(8)) << "the refused one left nothing behind";
}

TEST(FailAllocation, NeedsTheCpuAllocator) {
  const DefaultAllocatorInForce other;
  EXPECT_THROW(FailAllocation(1), StateError);
}

TEST(FailAllocation, EveryFailureOfAStepSurfacesAndTheNextStepIsRight) {
  at::manual_seed(7);
  SmallNetwork network;
  const std::vector<at::Tensor> expected = network.step();
  int64_t allocations = 0;
  {
    const FailAllocation counter(FailAllocation::kNever);
    network.step();
    allocations = counter.seen();
  }
  ASSERT_GT(allocations, 10);
  const int64_t before = live();
  for (int64_t n = 1; n <= allocations; ++n) {
    {
      const FailAllocation failure(n);
      EXPECT_THROW(network.step(), c10::OutOfMemoryError) << "allocation " << n;
      EXPECT_TRUE(failure.failed()) << "allocation " << n;
    }
    EXPECT_EQ(live(), before) << "allocation " << n;
    const std::vector<at::Tensor> gradients = network.step();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(gradients[i], expected[i])) << "allocation " << n << ", gradient " << i;
    }
  }
}

}  // namespace
}  // namespace infinitybatch::memory
