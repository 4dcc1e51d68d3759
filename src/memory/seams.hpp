#pragma once

#include <array>
#include <cstddef>

namespace infinitybatch::memory {

/// Addresses where two mappings of the system may meet, which Linux before 6.17 does not move
/// together. Mappings that the system has joined meanwhile may be among them. Constant at load
/// time, without a destructor and without allocations, for it serves an allocator.
class Seams {
 public:
  /// As many as the mappings that Linux lets a process have. Joined ones count apart here.
  static constexpr size_t kMost = size_t{1} << 16;

  /// Pages that the system has just given, or that were moved there.
  void add(char* begin, size_t bytes) noexcept;

  /// Pages that are no longer there.
  void remove(char* begin, size_t bytes) noexcept;

  /// How many of the last bytes in front of `end` are of one mapping for certain, `at_most` so
  /// many.
  size_t in_front(char* end, size_t at_most) const noexcept;

  size_t count() const noexcept { return count_; }

  /// Whether there were too many: then the answers mean nothing.
  bool lost() const noexcept { return lost_; }

 private:
  void add(char* seam) noexcept;

  std::array<char*, kMost> sorted_{};
  size_t count_ = 0;
  bool lost_ = false;
};

}  // namespace infinitybatch::memory
