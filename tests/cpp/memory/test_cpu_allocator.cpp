#include "memory/cpu_allocator.hpp"
#include "memory/pages.hpp"
#include "memory/trace.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::DefaultAllocatorInForce;
using memory_test::kCpu;
using memory_test::live;

TEST(CpuAllocator, IsInstalledWhenTheLibraryIsLoaded) {
  EXPECT_EQ(cpu_allocator_state(), CpuAllocatorState::counting);
  EXPECT_TRUE(cpu_allocator_installed());
  EXPECT_NO_THROW(require_cpu_allocator());
}

TEST(CpuAllocator, SaysWhenAnotherOneReplacedIt) {
  {
    const DefaultAllocatorInForce other;
    EXPECT_EQ(cpu_allocator_state(), CpuAllocatorState::replaced);
    EXPECT_THROW(require_cpu_allocator(), StateError);
    EXPECT_THROW(Limit(1 << 20), StateError);
    EXPECT_THROW(PeakScope{kCpu}, StateError);
    EXPECT_THROW(AllocationTrace{kCpu}, StateError);
  }
  EXPECT_TRUE(cpu_allocator_installed());
}

TEST(CpuAllocator, DescribesEachStateDifferently) {
  const std::string counting = describe(CpuAllocatorState::counting);
  const std::string late = describe(CpuAllocatorState::came_too_late);
  const std::string replaced = describe(CpuAllocatorState::replaced);
  EXPECT_NE(counting.find("is counted"), std::string::npos);
  EXPECT_NE(late.find("load infinitybatch first"), std::string::npos);
  EXPECT_NE(replaced.find("has replaced infinitybatch's"), std::string::npos);
}

TEST(CpuAllocator, CountsWhatTensorsAskedFor) {
  const int64_t before = live();
  {
    const at::Tensor one = block(1);
    EXPECT_EQ(live() - before, 1);
    const at::Tensor floats = at::empty({3, 5}, at::kFloat);
    EXPECT_EQ(live() - before, 1 + 3 * 5 * 4);
    const at::Tensor large = block(int64_t{1} << 28);
    EXPECT_EQ(live() - before, 61 + (int64_t{1} << 28));
  }
  EXPECT_EQ(live(), before);
}

TEST(CpuAllocator, CountsViewsOnce) {
  const int64_t before = live();
  at::Tensor base = at::empty({64, 64}, at::kDouble);
  const at::Tensor row = base[3];
  const at::Tensor turned = base.t();
  EXPECT_EQ(live() - before, 64 * 64 * 8);
  base.reset();
  EXPECT_EQ(live() - before, 64 * 64 * 8) << "a view keeps the whole storage";
}

TEST(CpuAllocator, CountsNothingForEmptyTensors) {
  const int64_t before = live();
  const at::Tensor empty = at::empty({0, 7}, at::kFloat);
  EXPECT_EQ(live(), before);
  EXPECT_EQ(empty.storage().data_ptr().get(), nullptr);
  EXPECT_EQ(empty.storage().data_ptr().device(), kCpu);
}

TEST(CpuAllocator, FollowsResizes) {
  const int64_t before = live();
  at::Tensor tensor = at::arange(100, at::kLong);
  tensor.resize_({1000});
  EXPECT_EQ(live() - before, 8000);
  EXPECT_EQ(tensor.slice(0, 0, 100).sum().item<int64_t>(), 4950) << "a resize keeps the data";
  tensor.resize_({10});
  EXPECT_EQ(live() - before, 8000) << "torch keeps the storage when a tensor shrinks";
}

TEST(CpuAllocator, AlignsAsTorchDoes) {
  for (const int64_t bytes : {1, 8, 63, 64, 65, 1000, 4096, 1 << 20, 5 << 20}) {
    const at::Tensor tensor = block(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % c10::gAlignment, 0) << bytes;
    std::memset(tensor.data_ptr(), 0x5a, static_cast<size_t>(bytes));
  }
}

#ifdef __GLIBC__
/// What many small blocks leave behind is room for a large one.
TEST(CpuAllocator, LeavesNoHolesBetweenBlocks) {
  mallopt(M_MMAP_THRESHOLD, 256 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  c10::Allocator& allocator = *c10::GetCPUAllocator();  // a tensor's own parts would lie between
  constexpr size_t kBlocks = 2000;
  std::vector<c10::DataPtr> blocks;
  blocks.reserve(kBlocks);
  size_t bytes = 0;
  for (size_t i = 0; i < kBlocks; ++i) {
    const size_t size = 2000 + 700 * (i % 7);
    blocks.push_back(allocator.allocate(size));
    bytes += size;
  }
  // Small objects that stay, as graphs and recordings are made of, go where there is room for them.
  std::vector<std::unique_ptr<char[]>> stay(2 * kBlocks);
  for (auto& each : stay) each = std::make_unique<char[]>(40);
  const c10::DataPtr last = allocator.allocate(2000);  // so that they do not end the heap
  blocks.clear();
  const size_t before = mallinfo2().arena;
  const c10::DataPtr large = allocator.allocate(bytes / 5 * 4);
  EXPECT_EQ(mallinfo2().arena, before);
}
#endif

TEST(CpuAllocator, KeepsPagesOfLargeBlocksForTheNext) {
  if (!Pages::supported()) GTEST_SKIP() << "AddressSanitizer, or no Linux";
  constexpr int64_t kBytes = 8 << 20;
  const void* before = nullptr;
  {
    const at::Tensor large = block(kBytes);
    before = large.data_ptr();
  }
  const Statistics now = stats(kCpu);
  EXPECT_GE(now.reserved - now.live, kBytes);
  EXPECT_EQ(block(kBytes).data_ptr(), before);
  EXPECT_GT(available(kCpu), now.reserved - now.live);
}

TEST(CpuAllocator, GivesRawMemoryAndClones) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  const int64_t before = live();
  void* raw = allocator.raw_allocate(100);
  EXPECT_EQ(live() - before, 100);
  std::memset(raw, 7, 100);
  {
    const c10::DataPtr clone = allocator.clone(raw, 100);
    EXPECT_EQ(live() - before, 200);
    EXPECT_EQ(std::memcmp(clone.get(), raw, 100), 0);
    EXPECT_TRUE(allocator.is_simple_data_ptr(clone));
  }
  allocator.raw_deallocate(raw);
  allocator.raw_deallocate(allocator.raw_allocate(0));
  EXPECT_EQ(live(), before);
}

TEST(CpuAllocator, KeepsTheProcessPeak) {
  reset_peak(kCpu);
  const int64_t before = live();
  EXPECT_EQ(stats(kCpu).peak, before);
  {
    const at::Tensor tensor = block(3000);
  }
  std::thread([] { const at::Tensor tensor = block(5000); }).join();
  EXPECT_EQ(stats(kCpu).peak, before + 5000);
  reset_peak(kCpu);
  EXPECT_EQ(stats(kCpu).peak, before);
}

TEST(CpuAllocator, CountsRightlyFromManyThreads) {
  const int64_t before = live();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      std::vector<at::Tensor> kept;
      for (int i = 0; i < 5000; ++i) {
        kept.push_back(block(1 + (i * 7 + t) % 500));
        if (kept.size() > 20) kept.erase(kept.begin());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(live(), before);
}

TEST(CpuAllocator, FreesInAnotherThread) {
  const int64_t before = live();
  at::Tensor tensor = block(4096);
  std::thread([&tensor] { tensor.reset(); }).join();
  EXPECT_EQ(live(), before);
}

TEST(CpuAllocator, SaysWhenTheSystemHasNoMemory) {
  const int64_t before = live();
  const PeakScope scope(kCpu);
  try {
    block(int64_t{1} << 60);
    FAIL() << "an exbibyte was allocated";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("the system refused 1048576 TiB"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(live(), before);
  EXPECT_EQ(scope.peak(), before) << "what was never given is no peak";
}

TEST(CpuAllocator, RefusesSizesThatOverflow) {
  const int64_t before = live();
  EXPECT_THROW(c10::GetCPUAllocator()->allocate(static_cast<size_t>(-8)), c10::OutOfMemoryError);
  EXPECT_THROW(c10::GetCPUAllocator()->allocate((size_t{1} << 62) + 1), c10::OutOfMemoryError);
  EXPECT_EQ(live(), before);
}

TEST(CpuAllocator, StatisticsOfTheCpuAreComplete) {
  const Statistics now = stats(kCpu);
  EXPECT_GT(now.total, int64_t{64} << 20);
  EXPECT_GE(now.reserved, now.live);
  EXPECT_FALSE(now.limit.has_value());
  EXPECT_GE(now.peak, now.live);
  EXPECT_GT(available(kCpu), 0);
  EXPECT_LE(available(kCpu), now.total);
}

/// Stands where torch's profiler does.
class Reporter final : public c10::MemoryReportingInfoBase {
 public:
  struct Report {
    void* address;
    int64_t bytes;
    size_t total;
  };

  void reportMemoryUsage(void* address, int64_t bytes, size_t total, size_t reserved,
                         c10::Device device) override {
    EXPECT_EQ(device, kCpu);
    EXPECT_EQ(reserved, 0);
    reports.push_back({address, bytes, total});
  }
  void reportOutOfMemory(int64_t bytes, size_t, size_t, c10::Device) override {
    refused.push_back(bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::vector<Report> reports;
  std::vector<int64_t> refused;
};

TEST(CpuAllocator, ReportsToTorchsProfiler) {
  at::Tensor earlier = block(10);
  const auto reporter = std::make_shared<Reporter>();
  const int64_t before = live();
  void* address = nullptr;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
    const at::Tensor tensor = block(1234);
    address = tensor.data_ptr();
    earlier.reset();
    const Limit limit(live() + 5);
    EXPECT_THROW(block(6), c10::OutOfMemoryError);
  }
  ASSERT_EQ(reporter->reports.size(), 3);
  EXPECT_EQ(reporter->reports[0].address, address);
  EXPECT_EQ(reporter->reports[0].bytes, 1234);
  EXPECT_EQ(reporter->reports[0].total, before + 1234);
  EXPECT_EQ(reporter->reports[1].bytes, -10);
  EXPECT_EQ(reporter->reports[2].address, address);
  EXPECT_EQ(reporter->reports[2].bytes, -1234);
  EXPECT_EQ(reporter->reports[2].total, before - 10);
  EXPECT_EQ(reporter->refused, std::vector<int64_t>{6});
}

}  // namespace
}  // namespace infinitybatch::memory
