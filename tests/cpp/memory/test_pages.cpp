#include "memory/pages.hpp"

#include <gtest/gtest.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace infinitybatch::memory {
namespace {

constexpr size_t kUnit = 256 << 10;  // of whole pages on every system

class Taken : public testing::Test {
 protected:
  void SetUp() override {
    if (!Pages::supported()) GTEST_SKIP() << "AddressSanitizer or no Linux: blocks are malloc's";
  }

  char* take(size_t bytes) {
    live_ += static_cast<int64_t>(bytes);
    most_ = std::max(most_, live_);
    return static_cast<char*>(pages_.take(bytes, live_, seconds_));
  }
  void give_back(void* block, size_t bytes) {
    live_ -= static_cast<int64_t>(bytes);
    pages_.give_back(block, bytes, live_, seconds_);
  }

  Pages pages_;
  int64_t live_ = 0;
  int64_t most_ = 0;
  int64_t seconds_ = 1000;
};

using PagesTest = Taken;

TEST_F(PagesTest, AreKeptForTheNextBlock) {
  char* const first = take(3 * kUnit);
  give_back(first, 3 * kUnit);
  EXPECT_EQ(pages_.kept(), 3 * kUnit);
  EXPECT_EQ(take(3 * kUnit), first);
  EXPECT_EQ(pages_.kept(), 0);
  give_back(first, 3 * kUnit);
}

TEST_F(PagesTest, JoinTheirNeighboursInAnyOrder) {
  std::vector<int> order{0, 1, 2, 3};
  do {
    char* const all = take(4 * kUnit);
    give_back(all, 4 * kUnit);
    std::vector<char*> parts;
    for (size_t i = 0; i < 4; ++i) parts.push_back(take(kUnit));
    EXPECT_EQ(parts[3], all + 3 * kUnit);
    for (const int i : order) give_back(parts[static_cast<size_t>(i)], kUnit);
    EXPECT_EQ(take(4 * kUnit), all) << "what was one run is one again";
    give_back(all, 4 * kUnit);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(PagesTest, ComeFromTheSmallestRunThatFits) {
  char* const large = take(8 * kUnit);
  char* const between = take(kUnit);
  char* const small = take(3 * kUnit);
  char* const behind = take(kUnit);
  give_back(large, 8 * kUnit);
  give_back(small, 3 * kUnit);
  EXPECT_EQ(take(2 * kUnit), small);
  EXPECT_EQ(take(kUnit), small + 2 * kUnit);
  EXPECT_EQ(take(kUnit), large);
  give_back(between, kUnit);
  give_back(behind, kUnit);
}

/// What a plan that tries several sizes asks for, in any order, held against a table of our own.
TEST_F(PagesTest, OfRandomBlocksNeverOverlapAndNeverPassThePeakByMuch) {
  struct Block {
    unsigned char* data;
    size_t bytes;
    unsigned char mark;
  };
  std::mt19937 random(1);
  std::vector<Block> blocks;
  for (int i = 0; i < 20'000; ++i) {
    if (blocks.empty() || (blocks.size() < 60 && random() % 2 == 0)) {
      const size_t bytes = 1 + random() % (random() % 10 == 0 ? 16 * kUnit : kUnit);
      auto* data = reinterpret_cast<unsigned char*>(take(bytes));
      ASSERT_NE(data, nullptr);
      const auto mark = static_cast<unsigned char>(random());
      data[0] = data[bytes / 2] = data[bytes - 1] = mark;
      blocks.push_back({data, bytes, mark});
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block last = blocks.back();
      blocks.pop_back();
      ASSERT_EQ(last.data[0], last.mark);
      ASSERT_EQ(last.data[last.bytes / 2], last.mark);
      ASSERT_EQ(last.data[last.bytes - 1], last.mark);
      give_back(last.data, last.bytes);
    }
    // Each block may end within a page.
    ASSERT_LE(live_ + pages_.kept(), most_ + most_ / 32 + 60 * 65536);
  }
  for (const Block& each : blocks) give_back(each.data, each.bytes);
  EXPECT_EQ(live_, 0);
}

TEST_F(PagesTest, GoBackWhenThePeakWasLongAgo) {
  char* const large = take(64 * kUnit);
  std::memset(large, 1, 64 * kUnit);
  give_back(large, 64 * kUnit);
  const auto step = [&] { give_back(take(kUnit), kUnit); };
  seconds_ += 59;
  step();
  EXPECT_EQ(pages_.kept(), 64 * kUnit);
  seconds_ += 2;
  step();
  EXPECT_EQ(pages_.kept(), 64 * kUnit) << "the minute before counts";
  seconds_ += 60;
  step();
  EXPECT_LE(pages_.kept(), 2 * kUnit);
#ifdef __linux__
  EXPECT_EQ(msync(large + 32 * kUnit, kUnit, MS_ASYNC), -1) << "they are the system's again";
  EXPECT_EQ(errno, ENOMEM);
#endif
}

TEST_F(PagesTest, AreFewRunsHoweverManyHolesThereAre) {
  constexpr size_t kBlocks = 2000;
  std::vector<char*> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.push_back(take(kUnit));
  for (size_t i = 0; i < kBlocks; i += 2) give_back(blocks[i], kUnit);
  EXPECT_LE(pages_.kept(), 256 * kUnit);
  EXPECT_GT(pages_.kept(), 200 * kUnit);
  for (size_t i = 1; i < kBlocks; i += 2) give_back(blocks[i], kUnit);
}

TEST_F(PagesTest, ThatTheSystemHasNotAreNull) {
  give_back(take(4 * kUnit), 4 * kUnit);
  EXPECT_EQ(pages_.take(size_t{1} << 60, live_, seconds_), nullptr);
  char* const block = take(kUnit);
  ASSERT_NE(block, nullptr);
  give_back(block, kUnit);
}

TEST_F(PagesTest, AreForAllThreads) {
  std::vector<std::thread> threads;
  for (unsigned char mark = 1; mark <= 4; ++mark) {
    threads.emplace_back([this, mark] {
      for (size_t i = 0; i < 2000; ++i) {
        const size_t bytes = (1 + i % 3) * kUnit;
        auto* data = static_cast<unsigned char*>(pages_.take(bytes, 16 * kUnit, seconds_));
        data[0] = data[bytes - 1] = mark;
        std::this_thread::yield();
        EXPECT_EQ(data[0], mark);
        EXPECT_EQ(data[bytes - 1], mark);
        pages_.give_back(data, bytes, 0, seconds_);
      }
    });
  }
  for (std::thread& each : threads) each.join();
}

}  // namespace
}  // namespace infinitybatch::memory
