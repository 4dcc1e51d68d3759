#include "support.hpp"

#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::kCpu;
using memory_test::live;

TEST(PeakScope, StartsAtWhatIsLive) {
  const at::Tensor held = block(777);
  const int64_t base = live();
  const PeakScope scope(kCpu);
  EXPECT_EQ(scope.peak(), base);
}

TEST(PeakScope, KeepsTheMost) {
  const int64_t base = live();
  const PeakScope scope(kCpu);
  {
    const at::Tensor tensor = block(5000);
  }
  const at::Tensor smaller = block(2000);
  EXPECT_EQ(scope.peak(), base + 5000);
}

TEST(PeakScope, SeesOnlyItsOwnTime) {
  {
    const at::Tensor before = block(1 << 20);
  }
  const int64_t base = live();
  const PeakScope scope(kCpu);
  {
    const at::Tensor tensor = block(100);
  }
  EXPECT_EQ(scope.peak(), base + 100);
}

TEST(PeakScope, ScopesMayEndInAnyOrder) {
  const int64_t base = live();
  const PeakScope outer(kCpu);
  auto middle = std::make_unique<PeakScope>(kCpu);
  {
    const PeakScope inner(kCpu);
    {
      const at::Tensor tensor = block(300);
    }
    EXPECT_EQ(middle->peak(), base + 300);
    middle.reset();
    const at::Tensor tensor = block(500);
    EXPECT_EQ(inner.peak(), base + 500);
  }
  EXPECT_EQ(outer.peak(), base + 500);
}

TEST(PeakScope, InnerScopesCountTowardsOuterOnes) {
  const int64_t base = live();
  const PeakScope outer(kCpu);
  {
    const at::Tensor tensor = block(1000);
  }
  {
    const PeakScope inner(kCpu);
    EXPECT_EQ(inner.peak(), base);
    {
      const at::Tensor tensor = block(300);
    }
    EXPECT_EQ(inner.peak(), base + 300);
    EXPECT_EQ(outer.peak(), base + 1000);
    {
      const PeakScope innermost(kCpu);
      const at::Tensor tensor = block(4000);
      EXPECT_EQ(innermost.peak(), base + 4000);
      EXPECT_EQ(inner.peak(), base + 4000) << "read while the innermost scope lives";
    }
    EXPECT_EQ(inner.peak(), base + 4000);
    EXPECT_EQ(outer.peak(), base + 4000);
  }
  EXPECT_EQ(outer.peak(), base + 4000);
  {
    const at::Tensor tensor = block(5000);
  }
  EXPECT_EQ(outer.peak(), base + 5000) << "the outer scope goes on after the inner one";
}

TEST(PeakScope, WorksUnderALimit) {
  const int64_t base = live();
  const Limit limit(base + 1000);
  const PeakScope scope(kCpu);
  EXPECT_THROW(block(2000), c10::OutOfMemoryError);
  EXPECT_EQ(scope.peak(), base) << "a refused allocation is no peak";
  {
    const at::Tensor tensor = block(900);
  }
  {
    const at::Tensor tensor = block(100);
  }
  EXPECT_EQ(scope.peak(), base + 900);
  EXPECT_THROW(block(1001), c10::OutOfMemoryError);
}

TEST(PeakScope, ALimitSetInsideAScopeHolds) {
  const int64_t base = live();
  const PeakScope scope(kCpu);
  {
    const at::Tensor tensor = block(5000);
  }
  const Limit limit(base + 1000);
  EXPECT_THROW(block(1001), c10::OutOfMemoryError) << "below the scope's peak, above the limit";
}

TEST(PeakScope, OtherThreadsRaiseItOnlyThroughWhatTheyHold) {
  const int64_t base = live();
  const PeakScope scope(kCpu);
  at::Tensor theirs;
  std::thread([&theirs] { theirs = block(5000); }).join();
  EXPECT_EQ(scope.peak(), base);
  {
    const at::Tensor tensor = block(1);
  }
  EXPECT_EQ(scope.peak(), base + 5001);
}

TEST(PeakScope, CoversBackward) {
  at::Tensor leaf = at::randn({128, 128});
  leaf.set_requires_grad(true);
  const int64_t size = 128 * 128 * 4;
  const int64_t base = live();
  const PeakScope scope(kCpu);
  leaf.exp().sum().backward();
  // The exponential, kept for backward, and the gradient.
  EXPECT_GE(scope.peak(), base + 2 * size);
  EXPECT_EQ(live(), base + size);
}

}  // namespace
}  // namespace infinitybatch::memory
