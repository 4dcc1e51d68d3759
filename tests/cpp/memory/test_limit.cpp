#include "memory/failure_injection.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::kCpu;
using memory_test::live;

constexpr int64_t kMebibyte = int64_t{1} << 20;

TEST(Limit, AllowsExactlyItsBytes) {
  const Limit limit(live() + 1000);
  const int64_t before = live();
  {
    const at::Tensor most = block(1000);
    EXPECT_THROW(block(1), c10::OutOfMemoryError);
  }
  EXPECT_THROW(block(1001), c10::OutOfMemoryError);
  EXPECT_NO_THROW(block(1000));
  EXPECT_EQ(live(), before);
}

TEST(Limit, SaysInNumbersWhatWentWrong) {
  const at::Tensor held = block(12 * kMebibyte);
  const Limit limit(live() + 8 * kMebibyte);
  const std::string expected_start = "infinitybatch: allocating 12 MiB on the CPU would make ";
  try {
    block(12 * kMebibyte);
    FAIL();
  } catch (const c10::OutOfMemoryError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind(expected_start, 0), 0) << message;
    EXPECT_NE(message.find(" live, the limit is "), std::string::npos) << message;
    EXPECT_NE(message.find("(4 MiB too much); raise the limit"), std::string::npos) << message;
  }
}

TEST(Limit, EndsWithItsScope) {
  const int64_t bytes = live() + 10;
  {
    const Limit limit(bytes);
    EXPECT_EQ(stats(kCpu).limit, bytes);
    EXPECT_THROW(block(11), c10::OutOfMemoryError);
  }
  EXPECT_FALSE(stats(kCpu).limit.has_value());
  EXPECT_NO_THROW(block(11));
}

TEST(Limit, NestedLimitsHeedTheSmaller) {
  const int64_t base = live();
  const Limit outer(base + 1000);
  {
    const Limit inner(base + 100);
    EXPECT_THROW(block(101), c10::OutOfMemoryError);
    const Limit wider(base + 5000);
    EXPECT_EQ(stats(kCpu).limit, base + 100);
    EXPECT_THROW(block(101), c10::OutOfMemoryError);
  }
  EXPECT_EQ(stats(kCpu).limit, base + 1000);
  EXPECT_NO_THROW(block(1000));
  EXPECT_THROW(block(1001), c10::OutOfMemoryError);
}

TEST(Limit, TellsWhetherAnythingFailedInItsTime) {
  const Limit outer(live() + 1000);
  EXPECT_FALSE(outer.allocation_failed());
  EXPECT_THROW(block(1001), c10::OutOfMemoryError);
  EXPECT_TRUE(outer.allocation_failed());
  {
    const Limit inner(live() + 1000);
    EXPECT_FALSE(inner.allocation_failed()) << "that was before";
    const FailAllocation failure(1);
    EXPECT_THROW(block(1), c10::OutOfMemoryError);
    EXPECT_TRUE(inner.allocation_failed()) << "not refused by the limit, and failed all the same";
    EXPECT_EQ(inner.refused(), 0);
  }
  EXPECT_TRUE(outer.allocation_failed());
}

TEST(Limit, TellsNothingOfOtherThreads) {
  const Limit limit(live() + 1000);
  std::thread([] {
    const Limit theirs(1);
    EXPECT_THROW(block(2), c10::OutOfMemoryError);
  }).join();
  EXPECT_FALSE(limit.allocation_failed());
}

TEST(Limit, MayLieBelowWhatIsLive) {
  at::Tensor held = block(1000);
  const Limit limit(live() - 500);
  EXPECT_THROW(block(1), c10::OutOfMemoryError);
  held.reset();
  EXPECT_NO_THROW(block(500));
}

TEST(Limit, LeavesOtherThreadsAloneButCountsThem) {
  const Limit limit(live() + 1000);
  at::Tensor theirs;
  std::thread([&theirs] { theirs = block(5000); }).join();
  EXPECT_EQ(theirs.numel(), 5000);
  EXPECT_THROW(block(1), c10::OutOfMemoryError) << "what another thread holds is live";
  theirs.reset();
  EXPECT_NO_THROW(block(1000));
}

TEST(Limit, HoldsInBackward) {
  at::Tensor leaf = at::randn({256, 256});
  leaf.set_requires_grad(true);
  const int64_t before = live();
  {
    const at::Tensor loss = leaf.exp().mul(2.0).sum();
    // Forward is done: backward needs at least one more tensor of this size.
    const Limit limit(live() + 256 * 256);
    EXPECT_THROW(loss.backward(), c10::OutOfMemoryError);
  }
  EXPECT_FALSE(leaf.grad().defined());
  EXPECT_EQ(live(), before);
  leaf.exp().mul(2.0).sum().backward();
  EXPECT_TRUE(at::allclose(leaf.grad(), leaf.detach().exp().mul(2.0)));
}

TEST(Limit, RefusesWhatIsNoLimit) {
  EXPECT_THROW(Limit(0), InvalidArgument);
  EXPECT_THROW(Limit(-1), InvalidArgument);
  EXPECT_FALSE(stats(kCpu).limit.has_value());
}

}  // namespace
}  // namespace infinitybatch::memory
