// A made-up accelerator whose streams do nothing until they are waited for: what the store asks of
// c10's generic interface, without a GPU.
#include "offload/host_block.hpp"
#include "offload/store.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace infinitybatch::offload {
namespace {

using offload_test::Directory;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kCopyStream = 7;

/// What was asked of the device, and what its streams have still to do.
struct MadeUpDevice {
  std::mutex mutex;
  std::vector<std::string> log;
  std::map<c10::StreamId, std::vector<std::function<void()>>> streams;
  int64_t live = 0;
  std::vector<int64_t> pinned;  // sizes of blocks

  static MadeUpDevice& instance() {
    static auto& device = *new MadeUpDevice;
    return device;
  }
  void note(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    log.push_back(what);
  }
  void synchronize(c10::StreamId stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& work : streams[stream]) work();
    streams[stream].clear();
  }
};

thread_local c10::StreamId current_stream = 0;

class MadeUpGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    MadeUpDevice::instance().note("new stream");
    return c10::Stream(c10::Stream::UNSAFE, device, kCopyStream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(),
                       std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    *event = &MadeUpDevice::instance();
    MadeUpDevice::instance().note("record " + std::to_string(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    EXPECT_NE(event, nullptr);
    MadeUpDevice::instance().note("block " + std::to_string(stream.id()));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeStream(const c10::Stream& stream) const override {
    MadeUpDevice::instance().note("synchronize " + std::to_string(stream.id()));
    MadeUpDevice::instance().synchronize(stream.id());
  }
};

/// Memory of the made-up device; overwritten when it is freed.
class MadeUpAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto* block = static_cast<char*>(std::malloc(size + 64));
    *reinterpret_cast<size_t*>(block) = size;
    std::memset(block + 64, 0xAA, size);
    MadeUpDevice::instance().live += static_cast<int64_t>(size);
    return {block + 64, block + 64, &free, c10::Device(kType, 0)};
  }
  static void free(void* data) {
    if (data == nullptr) return;
    char* block = static_cast<char*>(data) - 64;
    const size_t size = *reinterpret_cast<size_t*>(block);
    std::memset(data, 0xDD, size);
    MadeUpDevice::instance().live -= static_cast<int64_t>(size);
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

class MadeUpHostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    MadeUpDevice::instance().pinned.push_back(static_cast<int64_t>(size));
    void* data = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

/// Both ways; the stream does it when somebody waits for it.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  EXPECT_TRUE(non_blocking);
  EXPECT_EQ(current_stream, kCopyStream);
  auto& device = MadeUpDevice::instance();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.streams[current_stream].push_back(
      [to = to.data_ptr(), from = from.data_ptr(), bytes = from.nbytes()] {
        std::memcpy(to, from, bytes);
      });
  return to;
}

class AcceleratorTest : public testing::Test {
 protected:
  AcceleratorTest() {
    static const c10::impl::DeviceGuardImplRegistrar guard(kType, new MadeUpGuard);
    static MadeUpAllocator allocator;
    static MadeUpHostAllocator host_allocator;
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                  __FILE__, __LINE__);
    static const bool registered = [] {
      library.impl("copy_", torch::CppFunction::makeFromUnboxedFunction(&copy));
      c10::SetAllocator(kType, &allocator);
      at::setHostAllocator(kType, &host_allocator);
      return true;
    }();
    EXPECT_TRUE(registered);
    device_.log.clear();
    device_.pinned.clear();
  }

  at::Tensor tensor(int64_t bytes, int seed) {
    at::Tensor result = at::detail::empty_generic(
        {bytes}, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        at::kByte, std::nullopt);
    for (int64_t i = 0; i < bytes; ++i) data(result)[i] = value(i, seed);
    return result;
  }
  static unsigned char* data(const at::Tensor& tensor) {
    return static_cast<unsigned char*>(tensor.storage().mutable_data());
  }
  static unsigned char value(int64_t i, int seed) {
    return static_cast<unsigned char>(i * 7 + i / 251 + seed);
  }
  static bool same(const at::Tensor& tensor, int seed) {
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      if (data(tensor)[i] != value(i, seed)) return false;
    }
    return true;
  }
  /// Position of the first such entry at or after `from`; -1 where there is none.
  std::ptrdiff_t find(const std::string& what, std::ptrdiff_t from = 0) const {
    const auto found = std::find(device_.log.begin() + from, device_.log.end(), what);
    return found == device_.log.end() ? -1 : found - device_.log.begin();
  }

  MadeUpDevice& device_ = MadeUpDevice::instance();
};

TEST_F(AcceleratorTest, CopiesRunInTheirOwnStreamBehindTheDevicesWork) {
  const int64_t before = device_.live;
  std::vector<at::Tensor> tensors = offload_test::handles(tensor(100'000, 1), tensor(77, 2));
  Store store(c10::Device(kType), {.host_bytes = 1 << 20, .disk = false});
  EXPECT_EQ(store.device(), c10::Device(kType, 0));
  Offloaded offloaded = store.start_put(tensors);
  EXPECT_EQ(device_.live - before, 100'077) << "kept until the copy is done";
  offloaded.finish_put();
  EXPECT_EQ(device_.live, before);
  EXPECT_EQ(find("record 0"), 1) << "what the current stream was given so far";
  EXPECT_EQ(find("block 7"), 2);
  EXPECT_EQ(find("synchronize 7"), 3);
  device_.log.clear();
  offloaded.prefetch();
  EXPECT_EQ(device_.live - before, 100'077);
  offloaded.bring_back();
  EXPECT_EQ(find("record 0"), 0);
  EXPECT_EQ(find("block 7"), 1);
  EXPECT_EQ(find("synchronize 7"), 2);
  EXPECT_EQ(find("new stream"), -1) << "one stream for all copies";
  EXPECT_EQ(current_stream, 0);
  EXPECT_TRUE(same(tensors[0], 1));
  EXPECT_TRUE(same(tensors[1], 2));
}

TEST_F(AcceleratorTest, PinnedMemoryIsTakenInPowersOfTwo) {
  HostBlock block(11 * 4096 - 100, c10::Device(kType, 0));
  EXPECT_EQ(block.bytes(), 11 * 4096);
  EXPECT_EQ(device_.pinned.size(), 0U) << "pinned before it is needed";
  block.provide(11 * 4096);
  EXPECT_EQ(device_.pinned, (std::vector<int64_t>{8 * 4096, 2 * 4096, 4096}));
  EXPECT_EQ(block.piece(0, 100'000).size(), 8 * 4096);
  EXPECT_EQ(block.piece(8 * 4096 - 10, 100).size(), 10);
  EXPECT_EQ(block.piece(8 * 4096, 100'000).size(), 2 * 4096);
  EXPECT_EQ(block.piece(10 * 4096 + 5, 20).size(), 20);
}

TEST_F(AcceleratorTest, MemoryIsPinnedAsItIsNeeded) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  HostBlock block(int64_t{1} << 40, c10::Device(kType, 0));
  block.provide(1);
  EXPECT_EQ(device_.pinned, (std::vector<int64_t>{16 * kMiB}));
  block.provide(16 * kMiB);
  block.provide(100);
  EXPECT_EQ(device_.pinned.size(), 1U);
  block.provide(16 * kMiB + 1);
  EXPECT_EQ(device_.pinned, (std::vector<int64_t>{16 * kMiB, 16 * kMiB}));
  block.provide(65 * kMiB);
  EXPECT_EQ(device_.pinned, (std::vector<int64_t>{16 * kMiB, 16 * kMiB, 32 * kMiB, 64 * kMiB}));
}

TEST_F(AcceleratorTest, AcrossPiecesOfTheArenaAndOntoDisk) {
  const Directory directory;
  const int64_t before = device_.live;
  std::vector<at::Tensor> tensors =
      offload_test::handles(tensor(300'000, 1), tensor(20'000'000, 2), tensor(5, 3));
  Store store(c10::Device(kType, 0), {.host_bytes = 11 * 4096, .file = {directory.path()}});
  Offloaded offloaded = store.put(tensors);
  EXPECT_EQ(device_.live, before);
  EXPECT_EQ(store.statistics().host_bytes, 11 * 4096);
  EXPECT_GT(store.statistics().disk_bytes, 20'000'000);
  offloaded.bring_back();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(same(tensors[static_cast<size_t>(i)], i + 1)) << i;
  EXPECT_TRUE(directory.empty());
}

TEST_F(AcceleratorTest, TensorsOfTheHostStay) {
  Store store(c10::Device(kType, 0), {.host_bytes = 1 << 20, .disk = false});
  const Offloaded offloaded = store.put(offload_test::handles(at::ones({10})));
  EXPECT_FALSE(offloaded.away());
  EXPECT_EQ(offloaded.bytes().stays(), 0) << "they are not on the device";
}

}  // namespace
}  // namespace infinitybatch::offload
