#include "memory/pages.hpp"
#include "memory/seams.hpp"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <malloc.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

std::atomic<int> refused_moves{0};
std::function<void()> while_moving;
bool refuses_all_moves = false;

/// Where the mapping with this address ends, as Linux says since 6.11; before it refuses moves of
/// several mappings itself.
uintptr_t end_of_mapping(uintptr_t address) {
  struct Query {  // procmap_query of linux/fs.h
    uint64_t size, flags, address, begin, end;
    uint64_t rest[9];
  };
  static_assert(sizeof(Query) == 112);
  static const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  Query query{.size = 104, .flags = 0, .address = address, .begin = 0, .end = 0, .rest = {}};
  constexpr unsigned long kQuery = 0xC0686611;  // PROCMAP_QUERY
  return ioctl(maps, kQuery, &query) == 0 ? query.end : UINTPTR_MAX;
}

}  // namespace

/// In place of the C library's, for this program and what it is linked with: as Linux before 6.17,
/// which refuses to move several mappings at once and by then has unmapped what was at the new
/// place.
extern "C" void* mremap(void* from, size_t bytes, size_t new_bytes, int flags, ...) noexcept {
  va_list rest;
  va_start(rest, flags);
  void* const to = va_arg(rest, void*);
  va_end(rest);
  if (while_moving) while_moving();
  const auto begin = reinterpret_cast<uintptr_t>(from);
  if (refuses_all_moves || end_of_mapping(begin) < begin + bytes) {
    ++refused_moves;
    munmap(to, new_bytes);
    errno = EFAULT;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mremap, from, bytes, new_bytes, flags, to));
}

namespace infinitybatch::memory {
namespace {

constexpr size_t kUnit = 256 << 10;  // of whole pages on every system

size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

/// Bytes of addresses that the process has.
int64_t mapped() {
  std::ifstream sizes("/proc/self/statm");
  int64_t pages = 0;
  sizes >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

class Taken : public testing::Test {
 protected:
  void SetUp() override {
    if (!Pages::supported()) GTEST_SKIP() << "AddressSanitizer, or no Linux: blocks are malloc's";
  }

  void TearDown() override { EXPECT_EQ(refused_moves.exchange(0), 0); }

  char* take(size_t bytes) {
    live_ += static_cast<int64_t>(bytes);
    most_ = std::max(most_, live_);
    return static_cast<char*>(pages_.take(bytes, live_, seconds_));
  }
  void give_back(void* block, size_t bytes) {
    live_ -= static_cast<int64_t>(bytes);
    pages_.give_back(block, bytes, live_, seconds_);
  }

  Seams seams_;
  Pages pages_{seams_};
  int64_t live_ = 0;
  int64_t most_ = 0;
  int64_t seconds_ = 1000;
};

using PagesTest = Taken;

TEST_F(PagesTest, AreMovedHereAsByLinuxBefore617) {
  const auto map = [](size_t bytes, int protection) {
    return static_cast<char*>(mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  };
  constexpr int kBoth = PROT_READ | PROT_WRITE;
  char* const two = map(2 * kUnit, kBoth);
  ASSERT_EQ(mprotect(two, kUnit, PROT_READ), 0);
  char* const place = map(2 * kUnit, kBoth);
  EXPECT_EQ(mremap(two, 2 * kUnit, 2 * kUnit, MREMAP_MAYMOVE | MREMAP_FIXED, place), MAP_FAILED);
  const bool linux_refuses = end_of_mapping(reinterpret_cast<uintptr_t>(two)) == UINTPTR_MAX;
  EXPECT_EQ(refused_moves.exchange(0), linux_refuses ? 0 : 1);
  munmap(two, 2 * kUnit);
}

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
    ASSERT_LE(live_ + pages_.kept(), most_ + std::max<int64_t>(most_ / 32, 2 << 20) + 60 * 65536);
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
  EXPECT_LE(pages_.kept(), 9 * kUnit);
  EXPECT_EQ(msync(large + 32 * kUnit, kUnit, MS_ASYNC), -1) << "they are the system's again";
  EXPECT_EQ(errno, ENOMEM);
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

/// Beside the most that was live no run is long enough, and there is no room for fresh pages.
TEST_F(PagesTest, MoveToWhereTheyAreNeeded) {
  constexpr size_t kBlocks = 64;
  std::vector<char*> blocks;
  for (size_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(take(kUnit));
    std::memset(blocks.back(), 1, kUnit);
  }
  for (size_t i = 0; i < kBlocks; i += 2) give_back(blocks[i], kUnit);
  constexpr size_t kHalf = kBlocks / 2 * kUnit;
  ASSERT_EQ(pages_.kept(), kHalf);
  const int64_t before = page_faults();
  char* const large = take(kHalf);
  std::memset(large, 2, kHalf);
  EXPECT_LT(page_faults() - before, int64_t{kHalf / 2 / 4096}) << "most of them are not fresh";
  EXPECT_LE(pages_.kept(), 2 << 20);
  for (size_t i = 1; i < kBlocks; i += 2) {
    EXPECT_EQ(blocks[i][kUnit - 1], 1);
    give_back(blocks[i], kUnit);
  }
  give_back(large, kHalf);
}

/// A process may have 65,530 mappings, and every move may make two more.
TEST_F(PagesTest, AreOfFewMappingsHoweverOftenTheyMove) {
  const size_t most = mappings() + 1000;
  Seams seams;
  Pages pages(seams, most);
  std::mt19937 random(1);
  std::vector<std::pair<char*, size_t>> blocks;
  const auto give_one_back = [&] {
    std::swap(blocks[random() % blocks.size()], blocks.back());
    const auto [block, bytes] = blocks.back();
    live_ -= static_cast<int64_t>(bytes);
    pages.give_back(block, bytes, live_, seconds_);
    blocks.pop_back();
  };
  for (int i = 0; i < 30'000; ++i) {
    if (i % 1000 == 0) seconds_ += 60;  // moves are allowed anew
    while (live_ > static_cast<int64_t>(50 * kUnit)) give_one_back();
    const size_t bytes = 4096 * (1 + random() % 64);
    live_ += static_cast<int64_t>(bytes);
    auto* const block = static_cast<char*>(pages.take(bytes, live_, seconds_));
    ASSERT_NE(block, nullptr);
    for (size_t page = 0; page < bytes; page += 4096) block[page] = 1;
    blocks.emplace_back(block, bytes);
  }
  EXPECT_LT(mappings(), most + 500) << "holes make some, too";
  while (!blocks.empty()) give_one_back();
}

TEST_F(PagesTest, ThatTheSystemHasNotAreNull) {
  give_back(take(4 * kUnit), 4 * kUnit);
  constexpr size_t kTooMuch = size_t{1} << 60;
  EXPECT_EQ(pages_.take(kTooMuch, live_ + static_cast<int64_t>(kTooMuch), seconds_), nullptr);
  for (size_t i = 1; i <= 100; ++i) {
    give_back(take(i * kUnit), i * kUnit);
    ASSERT_LE(pages_.kept(), most_ + std::max<int64_t>(most_ / 32, 2 << 20))
        << "what was refused was no peak";
  }
  char* const block = take(kUnit);
  ASSERT_NE(block, nullptr);
  give_back(block, kUnit);
}

TEST_F(PagesTest, AreForAllThreads) {
  mallopt(M_ARENA_MAX, 1);  // each one of malloc's is 64 MiB of addresses, whenever it comes
  const auto work = [this](unsigned char mark) {
    for (size_t i = 0; i < 5000; ++i) {
      const size_t bytes = (1 + i % 3) * kUnit;
      auto* data = static_cast<unsigned char*>(pages_.take(bytes, 16 * kUnit, seconds_));
      data[0] = data[bytes - 1] = mark;
      if (i % 8 == 0) std::this_thread::yield();
      EXPECT_EQ(data[0], mark);
      EXPECT_EQ(data[bytes - 1], mark);
      pages_.give_back(data, bytes, 0, seconds_);
    }
  };
  int64_t before = 0;
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<std::thread> threads;
    for (unsigned char mark = 1; mark <= 4; ++mark) threads.emplace_back(work, mark);
    for (std::thread& each : threads) each.join();
    if (turn == 0) before = mapped();  // with the threads' stacks, which are kept
  }
  EXPECT_LE(mapped() - before, static_cast<int64_t>(16 * kUnit)) << "none is lost";
}

/// A block that a thread had from the system while another was inside is moved, too.
TEST_F(PagesTest, OfThreadsThatFoundOthersInsideMoveAsFarAsOneMappingGoes) {
  std::mt19937 random(1);
  std::vector<std::pair<char*, size_t>> blocks;
  const auto take_one = [&] {
    const size_t bytes = 4096 * (1 + random() % (random() % 10 == 0 ? 1024 : 64));
    blocks.emplace_back(take(bytes), bytes);
    ASSERT_NE(blocks.back().first, nullptr);
    for (size_t page = 0; page < bytes; page += 4096) blocks.back().first[page] = 1;
  };
  int found_others = 0;
  while_moving = [&] {
    ++found_others;
    take_one();
  };
  // How often pages move depends on where the system puts them.
  for (int i = 0; i < 20'000 || (found_others < 50 && i < 1'000'000); ++i) {
    if (blocks.size() < 40 && random() % 2 == 0) {
      take_one();
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const auto [block, bytes] = blocks.back();
      blocks.pop_back();
      give_back(block, bytes);
    }
  }
  while_moving = nullptr;
  EXPECT_GE(found_others, 20);
  for (const auto& [block, bytes] : blocks) give_back(block, bytes);
}

/// What was to be moved is left alone where it was, which must not happen each minute.
TEST_F(PagesTest, MoveNoMoreWhereTheSystemRefusesItForGood) {
  refuses_all_moves = true;
  for (int minute = 0; minute < 10; ++minute, seconds_ += 60) {
    std::vector<char*> blocks;
    for (size_t i = 0; i < 64; ++i) blocks.push_back(take(kUnit));
    for (size_t i = 0; i < 64; i += 2) give_back(blocks[i], kUnit);
    char* const large = take(32 * kUnit);
    std::memset(large, 1, 32 * kUnit);
    give_back(large, 32 * kUnit);
    for (size_t i = 1; i < 64; i += 2) give_back(blocks[i], kUnit);
    pages_.give_all_back();
  }
  refuses_all_moves = false;
  EXPECT_EQ(refused_moves.exchange(0), 3);
}

/// Each block that lies apart is a mapping; of too many the system would refuse any.
TEST_F(PagesTest, LieApartOnlyAsFarAsThereAreMappings) {
  constexpr size_t kMost = 100;
  Seams seams;
  Pages pages(seams, kMost);
  constexpr size_t kLarge = 32 * kUnit;
  std::vector<char*> apart;
  while_moving = [&] {
    while_moving = nullptr;
    for (size_t i = 0; i < 2000; ++i) {
      apart.push_back(static_cast<char*>(pages.take(kUnit, 0, /*seconds=*/0)));
    }
  };
  std::vector<char*> blocks;
  for (size_t i = 0; i < 64; ++i) {
    blocks.push_back(static_cast<char*>(pages.take(kUnit, int64_t(i) * kUnit, /*seconds=*/0)));
  }
  for (size_t i = 0; i < 64; i += 2) pages.give_back(blocks[i], kUnit, 32 * kUnit, 0);
  const size_t before = mappings();
  pages.give_back(pages.take(kLarge, 64 * kUnit, 0), kLarge, 32 * kUnit, 0);
  ASSERT_EQ(apart.size(), 2000);
  EXPECT_LT(mappings(), before + 2 * kMost);
  for (char* const each : apart) pages.give_back(each, kUnit, 0, 0);
  for (size_t i = 1; i < 64; i += 2) pages.give_back(blocks[i], kUnit, 0, 0);
}

TEST_F(PagesTest, LeaveNoSeams) {
  std::vector<char*> blocks;
  for (size_t i = 0; i < 64; ++i) blocks.push_back(take(kUnit));
  for (size_t i = 0; i < 64; i += 2) give_back(blocks[i], kUnit);
  give_back(take(20 * kUnit), 20 * kUnit);
  EXPECT_GT(seams_.count(), 0);
  for (size_t i = 1; i < 64; i += 2) give_back(blocks[i], kUnit);
  pages_.give_all_back();
  EXPECT_EQ(seams_.count(), 0);
}

/// Blocks from elsewhere make no call of take().
TEST_F(PagesTest, AreTrimmedWhereOthersNeedTheRoom) {
  give_back(take(64 * kUnit), 64 * kUnit);
  live_ += 8 * kUnit;
  EXPECT_FALSE(pages_.too_many(live_)) << "a thirty-second part or 2 MiB may be kept";
  live_ += kUnit;
  EXPECT_TRUE(pages_.too_many(live_));
  pages_.trim(live_, seconds_);
  EXPECT_EQ(pages_.kept(), 62 * kUnit) << "one ahead";
  EXPECT_FALSE(pages_.too_many(live_));
  pages_.give_all_back();
  EXPECT_FALSE(pages_.too_many(INT64_MAX)) << "there is nothing to give";
}

TEST(SeamsTest, AreFoundInFrontOfAnAddress) {
  std::vector<char> memory(100);
  char* const at = memory.data();
  Seams seams;
  EXPECT_EQ(seams.in_front(at + 50, 40), 40);
  seams.add(at, 30);
  seams.add(at + 30, 20);
  EXPECT_EQ(seams.count(), 3);
  EXPECT_EQ(seams.in_front(at + 50, 40), 20);
  EXPECT_EQ(seams.in_front(at + 50, 10), 10);
  EXPECT_EQ(seams.in_front(at + 40, 40), 10);
  EXPECT_EQ(seams.in_front(at + 30, 40), 30);
  seams.add(at + 10, 30);
  EXPECT_EQ(seams.count(), 4) << "the one within it is gone";
  EXPECT_EQ(seams.in_front(at + 40, 40), 30);
  seams.remove(at + 40, 10);
  EXPECT_EQ(seams.count(), 2);
  seams.remove(at, 100);
  EXPECT_EQ(seams.count(), 0);
}

TEST(SeamsTest, AreLostWhereThereAreTooMany) {
  std::vector<char> memory(2 * Seams::kMost + 2);
  Seams seams;
  for (size_t i = 0; i < Seams::kMost / 2; ++i) seams.add(&memory[4 * i], 1);
  EXPECT_EQ(seams.count(), Seams::kMost);
  EXPECT_FALSE(seams.lost());
  seams.add(&memory.back() - 1, 1);
  EXPECT_TRUE(seams.lost());
}

}  // namespace
}  // namespace infinitybatch::memory
