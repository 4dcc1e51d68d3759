// A made-up accelerator: what the library asks of c10's generic interface, without a GPU.
#include "memory/trace.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <utility>

namespace infinitybatch::memory {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// Two devices of 10,000 bytes, which reserve memory in blocks of 512.
class MadeUpAllocator final : public c10::DeviceAllocator {
 public:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(size + sizeof(size_t));
    *static_cast<size_t*>(data) = size;
    Stats& stats = devices[0];
    stats.allocated_bytes[kAll].increase(size);
    stats.reserved_bytes[kAll].increase((size + 511) / 512 * 512);
    report(data, static_cast<int64_t>(size));
    return {data, data, &free, c10::Device(kType, 0)};
  }
  static void free(void* data) {
    const size_t size = *static_cast<size_t*>(data);
    instance().devices[0].allocated_bytes[kAll].decrease(size);
    report(data, -static_cast<int64_t>(size));
    std::free(data);
  }
  static void report(void* data, int64_t bytes) {
    if (c10::memoryProfilingEnabled()) {
      c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::Device(kType, 0));
    }
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  Stats getDeviceStats(c10::DeviceIndex device) override { return devices.at(device); }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    devices.at(device).allocated_bytes[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    if (!says_its_memory) return DeviceAllocator::getMemoryInfo(device);
    return {10'000 - devices.at(device).reserved_bytes[kAll].current, 10'000};
  }

  static MadeUpAllocator& instance() {
    static auto& allocator = *new MadeUpAllocator;
    return allocator;
  }

  std::array<Stats, 2> devices;
  bool says_its_memory = true;
};

class AcceleratorTest : public testing::Test {
 protected:
  AcceleratorTest() {
    static const c10::impl::DeviceGuardImplRegistrar guard(kType,
                                                           new c10::impl::FakeGuardImpl<kType>);
    allocator_.devices = {};
    c10::impl::FakeGuardImpl<kType>::setDeviceIndex(0);
    c10::SetAllocator(kType, &allocator_);
  }
  ~AcceleratorTest() override { allocator_.says_its_memory = true; }

  MadeUpAllocator& allocator_ = MadeUpAllocator::instance();
  const c10::Device device_{kType, 0};
};

TEST_F(AcceleratorTest, StatisticsAreTheAllocators) {
  const c10::DataPtr kept = allocator_.allocate(1000);
  {
    const c10::DataPtr passing = allocator_.allocate(500);
  }
  const Statistics now = stats(device_);
  EXPECT_EQ(now.live, 1000);
  EXPECT_EQ(now.peak, 1500);
  EXPECT_EQ(now.reserved, 1536);
  EXPECT_EQ(now.total, 10'000);
  EXPECT_FALSE(now.limit.has_value());
  EXPECT_EQ(available(device_), 10'000 - 1536 + 536);
  reset_peak(device_);
  EXPECT_EQ(stats(device_).peak, 1000);
}

TEST_F(AcceleratorTest, WithoutAnIndexIsTheCurrentDevice) {
  const c10::DataPtr kept = allocator_.allocate(1000);
  EXPECT_EQ(stats(c10::Device(kType)).live, 1000);
  c10::impl::FakeGuardImpl<kType>::setDeviceIndex(1);
  EXPECT_EQ(stats(c10::Device(kType)).live, 0);
}

TEST_F(AcceleratorTest, BudgetsAreOfTheDevice) {
  const c10::DataPtr kept = allocator_.allocate(1000);
  EXPECT_EQ(Budget(0.5).resolve(device_), 5000);
  EXPECT_EQ(Budget("auto").resolve(device_), 1000 + 9 * 9000 / 10);
}

TEST_F(AcceleratorTest, ThatDoesNotSayItsMemoryNeedsABudgetInBytes) {
  allocator_.says_its_memory = false;
  EXPECT_EQ(stats(device_).total, 0);
  EXPECT_EQ(available(device_), 0);
  EXPECT_EQ(Budget(4096).resolve(device_), 4096);
  EXPECT_THROW(Budget(0.5).resolve(device_), Unsupported);
  EXPECT_THROW(Budget("auto").resolve(device_), Unsupported);
}

TEST_F(AcceleratorTest, PeakScopesNest) {
  const c10::DataPtr kept = allocator_.allocate(100);
  {
    const c10::DataPtr passing = allocator_.allocate(5000);
  }
  const PeakScope outer(device_);
  EXPECT_EQ(outer.peak(), 100);
  {
    const c10::DataPtr passing = allocator_.allocate(1000);
  }
  {
    const PeakScope other_device(c10::Device(kType, 1));
    const PeakScope inner(device_);
    EXPECT_EQ(inner.peak(), 100);
    {
      const c10::DataPtr passing = allocator_.allocate(2000);
    }
    {
      const PeakScope innermost(device_);
      {
        const c10::DataPtr passing = allocator_.allocate(300);
      }
      EXPECT_EQ(innermost.peak(), 400);
      EXPECT_EQ(inner.peak(), 2100);
    }
    EXPECT_EQ(inner.peak(), 2100) << "kept though the device's own peak was reset";
    EXPECT_EQ(outer.peak(), 2100) << "read while the inner scope lives";
    EXPECT_EQ(other_device.peak(), 0);
  }
  EXPECT_EQ(outer.peak(), 2100) << "handed over by the inner scope";
  {
    const c10::DataPtr passing = allocator_.allocate(3000);
  }
  EXPECT_EQ(outer.peak(), 3100);
}

TEST_F(AcceleratorTest, TraceSeesTheDeviceAndNothingElse) {
  const AllocationTrace trace(c10::Device{kType});
  const at::Tensor on_cpu = memory_test::block(64);
  const void* address = nullptr;
  {
    const c10::DataPtr data = allocator_.allocate(77);
    address = data.get();
  }
  ASSERT_EQ(trace.events().size(), 2);
  EXPECT_EQ(trace.events()[0].address, address);
  EXPECT_EQ(trace.events()[0].bytes, 77);
  EXPECT_EQ(trace.events()[1].address, address);
  EXPECT_EQ(trace.events()[1].bytes, -77);
}

TEST_F(AcceleratorTest, TraceEndsAndRefusesToTakeAProfilersPlace) {
  {
    const AllocationTrace trace(device_);
    EXPECT_THROW(AllocationTrace{device_}, StateError);
    EXPECT_NO_THROW(AllocationTrace{memory_test::kCpu});
  }
  EXPECT_FALSE(c10::memoryProfilingEnabled());
  EXPECT_NO_THROW(AllocationTrace{device_});
}

TEST(Accelerator, ThatTorchDoesNotSeeIsRefused) {
  const c10::Device meta(c10::DeviceType::Meta);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { stats(meta); }, [&] { reset_peak(meta); }, [&] { available(meta); },
           [&] { PeakScope{meta}; }, [&] { AllocationTrace{meta}; }}) {
    EXPECT_THROW(use(), InvalidArgument);
  }
}

}  // namespace
}  // namespace infinitybatch::memory
