#include "memory/failure_injection.hpp"
#include "offload/failure_injection.hpp"
#include "offload/store.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

namespace infinitybatch::offload {
namespace {

using offload_test::Directory;
using offload_test::handles;
using offload_test::kCpu;
using offload_test::live;
using offload_test::Values;

StoreOptions on_host(int64_t bytes) {
  return {.host_bytes = bytes, .disk = false};
}

TEST(Store, FreesMemoryAndBringsItBack) {
  Values values({1, 63, 64, 65, 100'000});
  Store store(kCpu, on_host(1 << 20));
  const int64_t before = live();
  Offloaded offloaded = store.put(values.tensors);
  EXPECT_EQ(before - live(), values.total());
  EXPECT_TRUE(offloaded.away());
  offloaded.bring_back();
  EXPECT_FALSE(offloaded.away());
  EXPECT_EQ(live(), before);
  EXPECT_TRUE(values.same());
  EXPECT_NO_THROW(offloaded.bring_back()) << "nothing is away";
}

TEST(Store, KeepsWhatTensorsAre) {
  Store store(kCpu, on_host(1 << 20));
  at::Tensor base = at::randn({6, 8}, at::kDouble);
  base.add_(1);
  const at::Tensor transposed = base.t();
  const at::Tensor slice = base.view({48}).slice(0, 5, 40, 3);
  const at::Tensor expanded = base.select(0, 1).unsqueeze(0).expand({4, 8});
  const at::Tensor copy = base.clone();
  const void* impl = base.unsafeGetTensorImpl();
  const auto version = base._version();
  const auto* storage = base.storage().unsafeGetStorageImpl();
  Offloaded offloaded = store.put(handles(base, transposed, slice, expanded), Others::tensors);
  EXPECT_EQ(offloaded.bytes().moves, 48 * 8);
  EXPECT_EQ(base.sizes(), at::IntArrayRef({6, 8}));
  EXPECT_EQ(slice.strides(), at::IntArrayRef({3}));
  EXPECT_EQ(slice.storage_offset(), 5);
  EXPECT_EQ(base.storage().nbytes(), 48 * 8);
  EXPECT_EQ(base._version(), version);
  EXPECT_TRUE(base.is_alias_of(transposed));
  EXPECT_EQ(base.device(), kCpu);
  EXPECT_EQ(base.view({48}).numel(), 48) << "views need no memory";
  offloaded.bring_back();
  EXPECT_EQ(base.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(base.storage().unsafeGetStorageImpl(), storage);
  EXPECT_EQ(base._version(), version);
  EXPECT_TRUE(base.equal(copy));
  EXPECT_TRUE(transposed.equal(copy.t()));
  EXPECT_TRUE(slice.equal(copy.view({48}).slice(0, 5, 40, 3)));
  EXPECT_TRUE(expanded.equal(copy.select(0, 1).unsqueeze(0).expand({4, 8})));
  base.mul_(2);
  EXPECT_TRUE(transposed.equal(copy.mul(2).t())) << "still one storage";
}

TEST(Store, ReadingWhatIsAwayIsAnError) {
  Store store(kCpu, on_host(1 << 20));
  std::vector<at::Tensor> tensors = handles(at::ones({100}));
  const auto message = [&] {
    try {
      (void)tensors[0].sum();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  Offloaded offloaded = store.put(tensors);
  EXPECT_NE(message().find("offloaded"), std::string::npos) << message();
  EXPECT_THROW(tensors[0].add_(1), c10::Error);
  EXPECT_THROW(tensors[0].clone(), c10::Error);
  offloaded.bring_back();
  EXPECT_EQ(tensors[0].sum().item<float>(), 100);
  EXPECT_NO_THROW(tensors[0].add_(1));
  offloaded = store.put(tensors);
  offloaded = Offloaded();
  EXPECT_NE(message().find("offloaded"), std::string::npos) << "given up: an error, not a crash";
}

TEST(Store, GivesGraphsBackBitForBit) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({40, 40}).set_requires_grad(true);
  const at::Tensor inputs = at::randn({16, 40});
  const auto forward = [&](std::vector<at::Tensor>& saved) {
    const at::Tensor hidden = at::mm(inputs, weight).tanh();
    const at::Tensor next = at::mm(hidden, weight).sigmoid();
    const at::Tensor normal = at::layer_norm(next, {40});
    saved = {hidden, next, normal};
    return normal.exp().sum();
  };
  const auto gradient = [&](const at::Tensor& loss) {
    loss.backward();
    const at::Tensor result = weight.grad();
    weight.mutable_grad().reset();
    return result;
  };
  std::vector<at::Tensor> saved;
  const at::Tensor expected = gradient(forward(saved));

  Store store(kCpu, {.host_bytes = 3000, .file = {.directory = ""}});
  const at::Tensor loss = forward(saved);
  const int64_t before = live();
  // The graph holds them beside us, as tensors of its own.
  Offloaded offloaded = store.put(saved, Others::tensors);
  EXPECT_EQ(offloaded.bytes().moves, 3 * 16 * 40 * 4);
  saved.clear();
  EXPECT_EQ(before - live(), 3 * 16 * 40 * 4);
  const at::Tensor other = at::randn({100'000});  // lands where they were
  EXPECT_THROW(loss.backward({}, /*keep_graph=*/true), c10::Error);
  weight.mutable_grad().reset();
  offloaded.bring_back();
  EXPECT_TRUE(gradient(loss).equal(expected));
}

TEST(Store, AllocatesUnderTheLimitAndMayTryAgain) {
  Values values({1000, 2000, 3000});
  Store store(kCpu, on_host(1 << 20));
  const int64_t before = live();
  Offloaded offloaded = store.put(values.tensors);
  {
    const memory::Limit limit(before - 1);
    EXPECT_THROW(offloaded.bring_back(), c10::OutOfMemoryError);
    EXPECT_THROW(offloaded.prefetch(), c10::OutOfMemoryError);
    EXPECT_TRUE(offloaded.away());
    EXPECT_EQ(live(), before - values.total()) << "nothing of it stays allocated";
    EXPECT_EQ(store.statistics().host_bytes, 1024 + 2048 + 3008);
  }
  const memory::Limit limit(before);
  offloaded.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Store, EveryFailedAllocationLeavesThingsAsTheyWere) {
  Values values({1000, 2000, 3000, 500});
  Store store(kCpu, on_host(1 << 20));
  for (int64_t n = 1; n <= 4; ++n) {
    const int64_t before = live();
    Offloaded offloaded = store.put(values.tensors);
    {
      const memory::FailAllocation failure(n);
      EXPECT_THROW(offloaded.bring_back(), c10::OutOfMemoryError);
    }
    EXPECT_EQ(live(), before - values.total());
    offloaded.bring_back();
    EXPECT_TRUE(values.same());
  }
}

TEST(Store, PutAllocatesNothingOnTheDevice) {
  Values values({1000, 2000});
  const Directory directory;
  Store store(kCpu, {.host_bytes = 1024, .file = {directory.path()}});
  const memory::Limit limit(live());
  const memory::FailAllocation counter(memory::FailAllocation::kNever);
  Offloaded offloaded = store.put(values.tensors);
  EXPECT_EQ(counter.seen(), 0);
}

TEST(Store, FillsTheArenaThenTheDisk) {
  Values values({5000, 7000, 9000});
  const Directory directory;
  Store store(kCpu, {.host_bytes = 10'000, .file = {directory.path()}});
  Offloaded first = store.put(at::ArrayRef<at::Tensor>(values.tensors).slice(0, 1));
  EXPECT_EQ(store.statistics().host_bytes, 5056);
  EXPECT_EQ(store.statistics().disk_bytes, 0);
  const Store::Need need = Store::need({7000, 9000}, 10'000 / 64 * 64 - 5056);
  Offloaded second = store.put(at::ArrayRef<at::Tensor>(values.tensors).slice(1));
  EXPECT_EQ(need.host, 9984 - 5056);
  EXPECT_EQ(store.statistics().host_bytes, 5056 + need.host);
  EXPECT_EQ(need.disk, 12288) << "7040 + 9024 - 4928, in whole blocks";
  EXPECT_EQ(store.statistics().disk_bytes, need.disk);
  first.bring_back();
  second.bring_back();
  EXPECT_TRUE(values.same());
  const StoreStatistics done = store.statistics();
  EXPECT_EQ(done.host_bytes, 0);
  EXPECT_EQ(done.host_peak, 9984);
  EXPECT_EQ(done.disk_bytes, 0);
  EXPECT_EQ(done.disk_peak, 12288);
  EXPECT_EQ(done.moved_out, 21'000);
  EXPECT_EQ(done.moved_back, 21'000);
  EXPECT_GT(done.seconds_copying, 0);
  EXPECT_EQ(done.seconds_hidden, 0);
  EXPECT_TRUE(directory.empty());
}

TEST(Store, LargerThanTheBuffersOnItsWay) {
  Values values({5, 9'000'001, 8 << 20, 77, 12'345'678});
  const Directory directory;
  for (const int64_t host : {int64_t{0}, int64_t{1'000'000}, int64_t{20'000'000}}) {
    Store store(kCpu, {.host_bytes = host, .file = {directory.path()}});
    Offloaded offloaded = store.put(values.tensors);
    EXPECT_GT(store.statistics().disk_bytes, 0);
    offloaded.bring_back();
    EXPECT_TRUE(values.same());
  }
}

TEST(Store, NoRoomLeavesTensorsAlone) {
  Values values({5000, 7000});
  const Directory directory;
  for (const StoreOptions& options :
       {on_host(8000),
        StoreOptions{.host_bytes = 64 * 60, .disk_bytes = 8000, .file = {directory.path()}}}) {
    Store store(kCpu, options);
    const int64_t before = live();
    try {
      store.put(values.tensors);
      FAIL();
    } catch (const OffloadError& error) {
      EXPECT_EQ(error.needed(), 5056 + 7040);
      EXPECT_EQ(error.available(), options.disk ? 64 * 60 + 4096 : 8000);
      EXPECT_NE(std::string(error.what()).find("host"), std::string::npos);
    }
    EXPECT_EQ(live(), before);
    EXPECT_TRUE(values.same());
    EXPECT_EQ(store.statistics().host_bytes, 0);
    Offloaded smaller = store.put(at::ArrayRef<at::Tensor>(values.tensors).slice(0, 1));
    EXPECT_TRUE(smaller.away()) << "the store still works";
    smaller.bring_back();
  }
}

TEST(Store, EveryFailureOfTheDiskLeavesThingsAsTheyWere) {
  Values values({9'000'000, 5'000'000, 4'000'000});
  const Directory directory;
  Store store(kCpu, {.host_bytes = 1'000'000, .file = {directory.path()}});
  int64_t transfers = 0;
  {
    const FailDisk counter(FailDisk::kNever);
    store.put(values.tensors).bring_back();
    transfers = counter.seen();
  }
  ASSERT_EQ(transfers, 6);
  const int64_t before = live();
  for (const int error : {ENOSPC, EDQUOT, EFBIG, EIO}) {
    for (int64_t n = 1; n <= transfers; ++n) {
      const FailDisk failure(n, error);
      Offloaded offloaded;
      if (n <= transfers / 2) {
        EXPECT_THROW(offloaded = store.put(values.tensors), OffloadError);
        EXPECT_FALSE(offloaded.away());
        EXPECT_EQ(live(), before);
        EXPECT_EQ(store.statistics().host_bytes + store.statistics().disk_bytes, 0);
      } else {
        offloaded = store.put(values.tensors);
        EXPECT_THROW(offloaded.bring_back(), OffloadError);
        EXPECT_TRUE(offloaded.away());
        EXPECT_EQ(live(), before - values.total());
        offloaded.bring_back();
      }
      ASSERT_TRUE(failure.failed());
      ASSERT_TRUE(values.same());
    }
  }
}

TEST(Store, GivenUpPlacesAreFree) {
  const Directory directory;
  Store store(kCpu, {.host_bytes = 1 << 20, .file = {directory.path()}});
  {
    Values values({2'000'000});
    const Offloaded offloaded = store.put(values.tensors);
    EXPECT_EQ(store.statistics().host_bytes, 1 << 20);
    EXPECT_GT(store.statistics().disk_bytes, 0);
  }
  EXPECT_EQ(store.statistics().host_bytes, 0);
  EXPECT_EQ(store.statistics().disk_bytes, 0);
  EXPECT_EQ(store.statistics().moved_back, 0);
}

TEST(Store, StoragesThatNobodyHoldsAreNotBroughtBack) {
  Values values({1000, 2000});
  Store store(kCpu, on_host(1 << 20));
  Offloaded offloaded = store.put(values.tensors);
  values.tensors.pop_back();
  values.bytes.pop_back();
  const int64_t away = live();
  offloaded.bring_back();
  EXPECT_EQ(live() - away, 1000);
  EXPECT_EQ(store.statistics().moved_back, 1000);
  EXPECT_TRUE(values.same());
}

TEST(Store, HandlesMoveAndOutliveTheirStore) {
  Values values({1000});
  Values others({10});
  Offloaded outer;
  {
    Store store(kCpu, on_host(1 << 20));
    Offloaded first = store.put(values.tensors);
    Offloaded second = std::move(first);
    EXPECT_FALSE(first.away());  // NOLINT(bugprone-use-after-move)
    EXPECT_TRUE(second.away());
    outer = store.put(others.tensors);
    outer = std::move(second);
    EXPECT_EQ(store.statistics().host_bytes, 1024) << "the other place was given up";
  }
  outer.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(Store, RefusesStoragesThatWereResized) {
  Store store(kCpu, on_host(1 << 20));
  at::Tensor tensor = at::ones({100});
  Offloaded offloaded = store.put(handles(tensor), Others::tensors);
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(40);
  EXPECT_THROW(offloaded.bring_back(), StateError);
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(400);
  offloaded.bring_back();
  EXPECT_TRUE(tensor.equal(at::ones({100})));
}

TEST(Store, RefusesMisuse) {
  EXPECT_THROW(Store(kCpu, on_host(-1)), InvalidArgument);
  EXPECT_THROW(Store(kCpu, StoreOptions{.disk_bytes = -1}), InvalidArgument);
  EXPECT_THROW(Store(kCpu, StoreOptions{.bandwidth = -1}), InvalidArgument);
  EXPECT_THROW(Store(kCpu, StoreOptions{.bandwidth = NAN}), InvalidArgument);
  EXPECT_THROW(Store(kCpu, StoreOptions{.file = {"/no/such/directory"}}), OffloadError);
  EXPECT_THROW(Store(kCpu, on_host(int64_t{1} << 60)), OffloadError) << "no machine has that";
  EXPECT_THROW(Store(c10::Device(c10::DeviceType::MTIA)), InvalidArgument);
}

TEST(Store, BandwidthIsThatOfTheLink) {
  Values values({1'000'000});
  Store store(kCpu, {.host_bytes = 1 << 20, .disk = false, .bandwidth = 20e6});
  const auto begin = std::chrono::steady_clock::now();
  Offloaded offloaded = store.put(values.tensors);
  offloaded.bring_back();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(taken.count(), 0.1);
  EXPECT_GE(store.statistics().seconds_copying, 0.1);
  EXPECT_DOUBLE_EQ(store.statistics().seconds_waited, store.statistics().seconds_copying);
}

TEST(Store, RandomOrderAgainstPlainCopies) {
  const Directory directory;
  for (unsigned seed = 0; seed < 5; ++seed) {
    std::mt19937 random(seed);
    Store store(kCpu, {.host_bytes = 200'000, .file = {directory.path()}});
    const int64_t before = live();
    struct Entry {
      Values values;
      Offloaded offloaded;
    };
    std::vector<std::unique_ptr<Entry>> entries;
    int64_t expected_live = before;
    for (int step = 0; step < 300; ++step) {
      const size_t i = entries.empty() ? 0 : random() % entries.size();
      const unsigned choice = random() % 10;
      if (entries.empty() || (choice < 4 && entries.size() < 30)) {
        std::vector<int64_t> sizes(1 + random() % 4);
        for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % 30'000);
        entries.push_back(std::make_unique<Entry>(Entry{Values(sizes), {}}));
        Entry& entry = *entries.back();
        if (random() % 2) {
          entry.offloaded = store.put(entry.values.tensors);
        } else {
          entry.offloaded = store.start_put(entry.values.tensors);
          if (random() % 2) entry.offloaded.finish_put();
        }
        if (random() % 3 == 0) entry.offloaded.prefetch();
      } else if (choice < 9) {
        Entry& entry = *entries[i];
        if (random() % 2) entry.offloaded.prefetch();
        if (random() % 2) entry.offloaded.bring_back();
        if (!entry.offloaded.away()) {
          ASSERT_TRUE(entry.values.same());
        }
      } else {
        entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    for (auto& entry : entries) {
      entry->offloaded.bring_back();
      ASSERT_TRUE(entry->values.same());
      expected_live += entry->values.total();
    }
    EXPECT_EQ(live(), expected_live);
    EXPECT_EQ(store.statistics().host_bytes, 0);
    EXPECT_EQ(store.statistics().disk_bytes, 0);
    EXPECT_EQ(store.statistics().host_peak, 200'000 / 64 * 64);
  }
}

}  // namespace
}  // namespace infinitybatch::offload
