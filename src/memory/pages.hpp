#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace infinitybatch::memory {

/// Whole pages for large blocks, from the system. Pages that are given back are kept for the next
/// blocks, for the system takes ten times as long to hand out a page as a layer does to fill it;
/// but only so many that the process never holds more than a thirty-second part above what was live
/// at most in the last minute or two. malloc has no such bound, for its free blocks lie between
/// live ones; pages are moved to where they are needed.
///
/// For all threads. Nothing waits: whoever finds another thread inside goes to the system, in a
/// process that was forked meanwhile, too. Has no destructor, for tensors in static variables are
/// freed after all others.
class Pages {
 public:
  /// Whether this system and this build have it: Linux since 6.17, without AddressSanitizer, which
  /// knows of malloc's blocks alone.
  static bool supported() noexcept;

  /// At least `bytes`, from the start of a page; null where the system has none.
  /// \param live bytes of all tensors, with these
  /// \param seconds the time on any clock
  void* take(size_t bytes, int64_t live, int64_t seconds) noexcept;

  /// \param bytes as they were asked for
  /// \param live bytes of all tensors, without these
  void give_back(void* block, size_t bytes, int64_t live, int64_t seconds) noexcept;

  /// Bytes that nobody uses.
  int64_t kept() const noexcept { return kept_.load(std::memory_order_relaxed); }

 private:
  /// Free pages in a row, with used ones or none on both sides.
  struct Run {
    char* begin;
    size_t bytes;
    uint64_t age;  ///< the smaller, the longer ago the last of it was given back
  };
  struct Piece {
    char* begin;
    size_t bytes;
  };
  static constexpr size_t kMostRuns = 256;
  static constexpr int64_t kSeconds = 60;

  bool enter() noexcept;
  void leave() noexcept { inside_.clear(std::memory_order_release); }

  /// Out of the smallest run that has so many bytes; null where none has.
  char* take_kept(size_t bytes) noexcept;
  void keep(char* begin, size_t bytes) noexcept;
  /// The last pages of the run that has been free for longest.
  Piece take_oldest(int64_t excess, size_t at_most) noexcept;
  /// Gives the oldest runs back to the system until at most so many bytes are left.
  void keep_at_most(int64_t bytes) noexcept;
  /// Moves what is kept beyond `spare` into `block`, which nobody has written yet, in place of
  /// fresh pages. \returns the block, or another one; null where the system has none
  char* fill(char* block, size_t bytes, int64_t spare) noexcept;
  void remove(size_t run) noexcept;

  /// What may be kept beside so many live bytes.
  int64_t room(int64_t live, int64_t seconds) noexcept;

  std::atomic_flag inside_;
  std::array<Run, kMostRuns> runs_{};  ///< by address
  size_t count_ = 0;
  uint64_t times_ = 0;  ///< how often runs were given back
  std::atomic<int64_t> kept_{0};
  // The most that was live since `since_`, and in the time before that.
  int64_t since_ = 0;
  int64_t most_ = 0;
  int64_t most_before_ = 0;
};

}  // namespace infinitybatch::memory
