#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace infinitybatch::memory {

class Seams;

/// Whole pages for large blocks, from the system. Pages that are given back are kept for the next
/// blocks, for the system takes longer to hand out a page than most layers do to fill it; but only
/// so many that the process holds at most a thirty-second part (of little an eighth, up to 2 MiB)
/// beyond what was live at most in the last minutes, which is looked at whenever a block comes or
/// goes.
/// malloc has no such bound, for its free blocks lie between live ones; pages are moved to where
/// they are needed.
///
/// For all threads. Nothing waits: whoever finds another thread inside goes to the system, in a
/// process that was forked meanwhile, too. Has no destructor, for tensors in static variables are
/// freed after all others.
class Pages {
 public:
  /// Each move may make two mappings more, and Linux lets a process have 65,530: so many, with
  /// those of others, are enough.
  static constexpr size_t kMostMappings = 20'000;

  /// \param seams of these pages alone
  explicit constexpr Pages(Seams& seams, size_t most_mappings = kMostMappings)
      : seams_(seams), most_mappings_(most_mappings) {}

  /// Whether this system and this build have it: Linux, without AddressSanitizer, which knows of
  /// malloc's blocks alone. Found by trying, in the first call.
  static bool supported() noexcept;

  /// The least bytes for which whole pages waste little, at most three per cent.
  static int64_t worthwhile() noexcept;

  /// At least `bytes`, from the start of a page; null where the system has none.
  /// \param live bytes of all tensors, with these
  /// \param seconds the time on any clock
  void* take(size_t bytes, int64_t live, int64_t seconds) noexcept;

  /// \param bytes as they were asked for
  /// \param live bytes of all tensors, without these
  void give_back(void* block, size_t bytes, int64_t live, int64_t seconds) noexcept;

  /// Whether with so many live bytes more is kept than may be. Costs little: for each block that
  /// comes from elsewhere.
  bool too_many(int64_t live) const noexcept {
    return live > live_up_to_.load(std::memory_order_relaxed);
  }

  /// Keeps no more than may be kept.
  void trim(int64_t live, int64_t seconds) noexcept;

  /// Gives what nobody uses back to the system.
  void give_all_back() noexcept;

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
  static constexpr int64_t kSlack = 2 << 20;

  /// \returns whether nobody else is inside
  bool enter() noexcept;
  void leave() noexcept;

  /// For a thread that found another one inside.
  char* take_outside(size_t bytes) noexcept;

  // What follows is for the thread that is inside.
  char* take_inside(size_t bytes, int64_t live, int64_t seconds) noexcept;
  /// Out of the smallest run that has so many bytes; null where none has.
  char* take_kept(size_t bytes) noexcept;
  void keep(char* begin, size_t bytes) noexcept;
  /// The last pages of the run that has been free for longest, for a move no more than one does.
  Piece take_oldest(int64_t excess, size_t at_most, bool to_move = false) noexcept;
  /// Gives the oldest runs back to the system until at most so many bytes are left.
  void keep_at_most(int64_t bytes) noexcept;
  /// A new block, of what is kept beyond `spare` as far as that goes, then of fresh pages.
  char* gather(size_t bytes, int64_t spare) noexcept;
  char* fresh(size_t bytes) noexcept;
  void drop(Piece piece) noexcept;
  void remove(size_t run) noexcept;

  void tell_time(int64_t seconds) noexcept;
  /// What may be in use and kept.
  int64_t ceiling(int64_t now) const noexcept;
  /// What may be kept beside so many live bytes.
  int64_t room(int64_t live) const noexcept {
    const int64_t now = in_use(live);  // once: other threads change it
    return ceiling(now) - now;
  }
  /// With what is used to the ends of pages.
  int64_t in_use(int64_t live) const noexcept {
    return live + rounding_.load(std::memory_order_relaxed);
  }

  std::atomic_flag inside_;
  std::array<Run, kMostRuns> runs_{};  ///< by address
  size_t count_ = 0;
  uint64_t times_ = 0;  ///< how often runs were given back
  std::atomic<int64_t> kept_{0};
  std::atomic<int64_t> rounding_{0};
  std::atomic<int64_t> live_up_to_{std::numeric_limits<int64_t>::max()};
  // The most that was in use since `since_`, and in the time before that.
  int64_t since_ = 0;
  int64_t most_ = 0;
  int64_t most_before_ = 0;
  Seams& seams_;
  // As they were counted at `since_`, and what moves and blocks that lie apart may have made since.
  std::atomic<size_t> mappings_{0};
  std::atomic<size_t> most_mappings_;  ///< 0: nothing is moved any more
  int failed_moves_ = 0;
};

}  // namespace infinitybatch::memory
