#include "memory/foreign_storage.hpp"
#include "support.hpp"

#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <thread>

namespace infinitybatch::memory {
namespace {

using memory_test::block;
using memory_test::DefaultAllocatorInForce;
using memory_test::kCpu;
using memory_test::live;

/// What `make` returns, allocated as before this library was loaded.
template <typename Make>
auto foreign(Make make) {
  const DefaultAllocatorInForce other;
  return make();
}

at::Tensor foreign_block(int64_t bytes) {
  return foreign([bytes] { return block(bytes); });
}

TEST(ForeignStorages, CountWhileTheyLive) {
  const at::Tensor tensor = foreign_block(1000);
  const int64_t before = live();
  {
    const ForeignStorages foreign_storages({tensor, foreign_block(24)});
    EXPECT_EQ(foreign_storages.bytes(), 1024);
    EXPECT_EQ(live() - before, 1024);
  }
  EXPECT_EQ(live(), before);
}

TEST(ForeignStorages, CountEachStorageOnceAndWhole) {
  const at::Tensor tensor = foreign_block(1000);
  const int64_t before = live();
  const ForeignStorages storages({tensor.slice(0, 0, 10), tensor, tensor.view({10, 100})});
  EXPECT_EQ(storages.bytes(), 1000);
  EXPECT_EQ(live() - before, 1000);
}

TEST(ForeignStorages, CountOnceInTheProcess) {
  const at::Tensor shared = foreign_block(1000);
  const at::Tensor other = foreign_block(50);
  const int64_t before = live();
  auto first = std::make_unique<ForeignStorages>(std::vector<at::Tensor>{shared});
  std::unique_ptr<ForeignStorages> second;
  std::thread([&] {
    second = std::make_unique<ForeignStorages>(std::vector<at::Tensor>{shared, other});
  }).join();
  EXPECT_EQ(second->bytes(), 1050);
  EXPECT_EQ(live() - before, 1050);
  first.reset();
  EXPECT_EQ(live() - before, 1050);
  second.reset();
  EXPECT_EQ(live(), before);
}

TEST(ForeignStorages, LeaveOutWhatIsCountedOrNotTorchs) {
  std::vector<float> numbers(100);
  const int64_t before = live();
  const at::Tensor ours = block(100);
  const at::Tensor theirs = at::from_blob(numbers.data(), {100}, at::kFloat);
  const at::Tensor empty = foreign_block(0);
  const at::Tensor meta = at::empty({100}, at::TensorOptions().device(at::kMeta));
  const ForeignStorages storages({ours, theirs, empty, meta, at::Tensor()});
  EXPECT_EQ(storages.bytes(), 0);
  EXPECT_EQ(live() - before, 100);
}

TEST(ForeignStorages, CountSparseTensorsByTheirParts) {
  const at::Tensor coo = foreign([] {
    const at::Tensor indices = at::zeros({2, 2}, at::kLong);
    indices[0][1] = 2;
    return at::sparse_coo_tensor(indices, at::ones({2}, at::kFloat), {3, 3});
  });
  const ForeignStorages of_coo({coo});
  EXPECT_EQ(of_coo.bytes(), 4 * 8 + 2 * 4);
  const auto compressed = [](auto make) {
    return foreign([&] {
      const auto options = at::TensorOptions(at::kFloat);
      return make(at::arange(6, at::kLong), at::arange(5, at::kLong), at::ones({5}), options);
    });
  };
  const at::Tensor csr = compressed([](auto rows, auto columns, auto values, auto options) {
    return at::sparse_csr_tensor(rows, columns, values, {5, 5}, options);
  });
  const ForeignStorages of_csr({csr});
  EXPECT_EQ(of_csr.bytes(), 6 * 8 + 5 * 8 + 5 * 4);
  const at::Tensor csc = compressed([](auto columns, auto rows, auto values, auto options) {
    return at::sparse_csc_tensor(columns, rows, values, {5, 5}, options);
  });
  const ForeignStorages of_csc({csc});
  EXPECT_EQ(of_csc.bytes(), 6 * 8 + 5 * 8 + 5 * 4);
}

TEST(ForeignStorages, MayBeFreedMeanwhile) {
  at::Tensor tensor = foreign_block(1000);
  const int64_t before = live();
  {
    const ForeignStorages storages({tensor});
    tensor.reset();
    // A new storage at the same address would be another one.
    const at::Tensor next = foreign_block(1000);
    const ForeignStorages more({next});
    EXPECT_EQ(more.bytes(), 1000);
    EXPECT_EQ(live() - before, 2000);
  }
  EXPECT_EQ(live(), before);
}

TEST(ForeignStorages, CountAgainstLimitAndPeak) {
  const at::Tensor tensor = foreign_block(1000);
  const int64_t base = live();
  reset_peak(kCpu);
  const PeakScope scope(kCpu);
  const Limit limit(base + 1500);
  const ForeignStorages storages({tensor});
  EXPECT_EQ(scope.peak(), base + 1000);
  EXPECT_EQ(stats(kCpu).peak, base + 1000);
  EXPECT_THROW(block(501), c10::OutOfMemoryError);
  EXPECT_NO_THROW(block(500));
}

}  // namespace
}  // namespace infinitybatch::memory
