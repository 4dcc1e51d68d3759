#include "memory/pages.hpp"

#include "memory/seams.hpp"

#include <algorithm>

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define INFINITYBATCH_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define INFINITYBATCH_ADDRESS_SANITIZER 1
#endif
#endif

namespace infinitybatch::memory {
namespace {

#ifdef __linux__
size_t page() noexcept {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

char* from_system(size_t bytes) noexcept {
  void* pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
}

void to_system(char* pages, size_t bytes) noexcept {
  // A hole in a mapping makes two of it, of which a process may have only so many.
  if (munmap(pages, bytes) != 0) madvise(pages, bytes, MADV_DONTNEED);
}

/// Puts pages in the place of others, without a copy. Where that fails nobody knows what is at
/// either place, which another thread may have been given meanwhile: both are to be left alone.
bool move(char* from, char* to, size_t bytes) noexcept {
  return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

/// Pages that no others lie beside: there is a hole in front and one behind.
char* alone_from_system(size_t bytes) noexcept {
  char* const hole = from_system(bytes + 2 * page());
  if (hole == nullptr) return nullptr;
  munmap(hole, page());
  munmap(hole + page() + bytes, page());
  return hole + page();
}

/// Whether the system moves pages, and what is in them.
bool moves_pages() noexcept {
  const size_t size = page();
  char* const first = from_system(2 * size);
  char* const second = from_system(2 * size);
  if (first == nullptr || second == nullptr) return false;
  first[0] = 'b';
  first[size] = 'a';
  if (!move(first + size, second, size) || !move(first, second + size, size)) return false;
  const bool right = second[0] == 'a' && second[size] == 'b';
  to_system(second, 2 * size);
  return right;
}

/// Of this process; 0 where the system does not say.
size_t count_mappings() noexcept {
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  size_t lines = 0;
  std::array<char, 16384> text;
  for (;;) {
    const ssize_t bytes = read(file, text.data(), text.size());
    if (bytes <= 0) break;
    lines += static_cast<size_t>(std::count(text.begin(), text.begin() + bytes, '\n'));
  }
  close(file);
  return lines;
}
#else
size_t page() noexcept {
  return 1;
}
char* from_system(size_t) noexcept {
  return nullptr;
}
void to_system(char*, size_t) noexcept {}
bool move(char*, char*, size_t) noexcept {
  return false;
}
char* alone_from_system(size_t) noexcept {
  return nullptr;
}
bool moves_pages() noexcept {
  return false;
}
size_t count_mappings() noexcept {
  return 0;
}
#endif

size_t in_pages(size_t bytes) noexcept {
  return (bytes + page() - 1) / page() * page();
}

}  // namespace

bool Pages::supported() noexcept {
#ifdef INFINITYBATCH_ADDRESS_SANITIZER
  constexpr bool kWanted = false;
#else
  constexpr bool kWanted = true;
#endif
  static const bool result = kWanted && moves_pages();
  return result;
}

int64_t Pages::worthwhile() noexcept {
  constexpr int64_t kPages = 32;
  return kPages * static_cast<int64_t>(page());
}

bool Pages::enter() noexcept {
  constexpr int kTries = 200;
  for (int i = 0; i < kTries; ++i) {
    if (!inside_.test_and_set(std::memory_order_acquire)) return true;
  }
  return false;
}

void Pages::leave() noexcept {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const int64_t beside = kept() + rounding_.load(std::memory_order_relaxed);
  live_up_to_.store(kept() == 0 ? kNever : ceiling(/*now=*/0) - beside, std::memory_order_relaxed);
  inside_.clear(std::memory_order_release);
}

void* Pages::take(size_t bytes, int64_t live, int64_t seconds) noexcept {
  const size_t whole = in_pages(bytes);
  char* pages = nullptr;
  // Who could not enter and is refused has not seen what is kept.
  for (int tries = 0; tries < 2 && pages == nullptr; ++tries) {
    if (enter()) {
      pages = take_inside(whole, live, seconds);
      leave();
    } else {
      pages = take_outside(whole);
    }
  }
  if (pages != nullptr) {
    rounding_.fetch_add(static_cast<int64_t>(whole - bytes), std::memory_order_relaxed);
  }
  return pages;
}

char* Pages::take_outside(size_t bytes) noexcept {
  // Where they join others only the thread inside may note, so they lie apart; of so many that the
  // system would refuse mappings nothing is noted, and nothing moved from then on.
  if (mappings_.fetch_add(1, std::memory_order_relaxed) < most_mappings_) {
    return alone_from_system(bytes);
  }
  most_mappings_ = 0;
  return from_system(bytes);
}

char* Pages::take_inside(size_t bytes, int64_t live, int64_t seconds) noexcept {
  tell_time(seconds);
  char* pages = take_kept(bytes);
  if (pages == nullptr) pages = gather(bytes, room(live));
  if (pages == nullptr && count_ > 0) {
    keep_at_most(0);
    pages = fresh(bytes);
  }
  // What is refused is no peak.
  if (pages != nullptr) most_ = std::max(most_, in_use(live));
  return pages;
}

void Pages::give_back(void* block, size_t bytes, int64_t live, int64_t seconds) noexcept {
  const size_t whole = in_pages(bytes);
  rounding_.fetch_sub(static_cast<int64_t>(whole - bytes), std::memory_order_relaxed);
  auto* pages = static_cast<char*>(block);
  if (!enter()) return to_system(pages, whole);
  tell_time(seconds);
  most_ = std::max(most_, in_use(live));
  if (count_ == kMostRuns) {
    drop(take_oldest(kept(), SIZE_MAX));
  }
  keep(pages, whole);
  keep_at_most(room(live));
  leave();
}

void Pages::trim(int64_t live, int64_t seconds) noexcept {
  if (inside_.test_and_set(std::memory_order_acquire)) return;  // the next block asks again
  tell_time(seconds);
  most_ = std::max(most_, in_use(live));
  constexpr int64_t kAhead = 256 << 10;  // not a page for each small block
  const int64_t room = this->room(live);
  keep_at_most(room - std::min(room / 8, kAhead));
  leave();
}

void Pages::give_all_back() noexcept {
  if (!enter()) return;
  keep_at_most(0);
  leave();
}

char* Pages::take_kept(size_t bytes) noexcept {
  size_t best = count_;
  for (size_t i = 0; i < count_; ++i) {
    if (runs_[i].bytes >= bytes && (best == count_ || runs_[i].bytes < runs_[best].bytes)) best = i;
  }
  if (best == count_) return nullptr;
  Run& run = runs_[best];
  char* const pages = run.begin;
  run.begin += bytes;
  run.bytes -= bytes;
  kept_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (run.bytes == 0) remove(best);
  return pages;
}

void Pages::keep(char* begin, size_t bytes) noexcept {
  kept_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  const uint64_t age = ++times_;
  Run* const behind =
      std::upper_bound(runs_.data(), runs_.data() + count_, begin,
                       [](const char* address, const Run& run) { return address < run.begin; });
  Run* const before = behind == runs_.data() ? nullptr : behind - 1;
  const bool joins_before = before != nullptr && before->begin + before->bytes == begin;
  const bool joins_behind = behind != runs_.data() + count_ && begin + bytes == behind->begin;
  if (joins_before) {
    before->bytes += bytes + (joins_behind ? behind->bytes : 0);
    before->age = age;
    if (joins_behind) remove(static_cast<size_t>(behind - runs_.data()));
  } else if (joins_behind) {
    *behind = {begin, bytes + behind->bytes, age};
  } else {
    std::copy_backward(behind, runs_.data() + count_, runs_.data() + count_ + 1);
    *behind = {begin, bytes, age};
    ++count_;
  }
}

Pages::Piece Pages::take_oldest(int64_t excess, size_t at_most, bool to_move) noexcept {
  const auto oldest = std::min_element(runs_.begin(), runs_.begin() + count_,
                                       [](const Run& a, const Run& b) { return a.age < b.age; });
  size_t bytes = std::min({oldest->bytes, in_pages(static_cast<size_t>(excess)), at_most});
  char* const end = oldest->begin + oldest->bytes;
  if (to_move) bytes = seams_.in_front(end, bytes);
  oldest->bytes -= bytes;
  kept_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (oldest->bytes == 0) remove(static_cast<size_t>(oldest - runs_.begin()));
  return {end - bytes, bytes};
}

char* Pages::fresh(size_t bytes) noexcept {
  char* const pages = from_system(bytes);
  if (pages != nullptr) seams_.add(pages, bytes);
  return pages;
}

void Pages::drop(Piece piece) noexcept {
  seams_.remove(piece.begin, piece.bytes);
  to_system(piece.begin, piece.bytes);
}

void Pages::keep_at_most(int64_t bytes) noexcept {
  while (kept() > bytes && count_ > 0) drop(take_oldest(kept() - bytes, SIZE_MAX));
}

char* Pages::gather(size_t bytes, int64_t spare) noexcept {
  char* block = fresh(bytes);
  size_t filled = 0;
  while (block != nullptr && count_ > 0 && kept() > spare && filled < bytes &&
         mappings_ < most_mappings_ && !seams_.lost()) {
    const Piece piece = take_oldest(kept() - spare, bytes - filled, /*to_move=*/true);
    seams_.remove(piece.begin, piece.bytes);
    mappings_ += 2;
    if (move(piece.begin, block + filled, piece.bytes)) {
      seams_.add(block + filled, piece.bytes);
      filled += piece.bytes;
      continue;
    }
    // What was to be moved may be lost, which must not go on: it may be a rule of the system's.
    constexpr int kMostFailures = 3;
    if (++failed_moves_ == kMostFailures) most_mappings_ = 0;
    mappings_ = most_mappings_.load();
    const size_t behind = filled + piece.bytes;
    if (filled > 0) drop({block, filled});
    if (behind < bytes) drop({block + behind, bytes - behind});
    keep_at_most(spare);
    block = fresh(bytes);
  }
  keep_at_most(spare);
  return block;
}

void Pages::remove(size_t run) noexcept {
  std::copy(runs_.begin() + run + 1, runs_.begin() + count_, runs_.begin() + run);
  --count_;
}

void Pages::tell_time(int64_t seconds) noexcept {
  if (seconds - since_ < kSeconds) return;
  most_before_ = seconds - since_ < 2 * kSeconds ? most_ : 0;
  most_ = 0;
  since_ = seconds;
  mappings_ = count_mappings();
}

int64_t Pages::ceiling(int64_t now) const noexcept {
  const int64_t most = std::max({most_, most_before_, now});
  return most + std::max(most / 32, std::min(most / 8, kSlack));
}

}  // namespace infinitybatch::memory
