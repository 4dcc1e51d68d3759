#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinitybatch::offload {

/// A stretch of an arena or of a file, in bytes.
struct Extent {
  int64_t begin = 0;
  int64_t bytes = 0;
};

/// Who has which stretch of a fixed number of bytes. A request is one extent in the smallest hole
/// that holds it, the lowest of equal ones; where no hole does, several: the largest holes, until
/// the rest fits into one. So requests succeed exactly as long as their bytes are free, and a plan
/// need only add them up.
class Extents {
 public:
  /// \param capacity  bytes, rounded down to the alignment
  /// \param alignment every extent begins at, and has, a multiple of it; a power of two
  /// \throws InvalidArgument
  Extents(int64_t capacity, int64_t alignment);

  /// Extents of `bytes`, rounded up to the alignment; none where fewer are free, or for 0 bytes.
  std::vector<Extent> take(int64_t bytes);
  /// Gives back what `take` gave. Neighbouring holes become one.
  void give_back(const std::vector<Extent>& extents) noexcept;

  int64_t rounded(int64_t bytes) const noexcept;  ///< up to the alignment
  int64_t capacity() const noexcept { return capacity_; }
  int64_t free() const noexcept { return free_; }
  int64_t used() const noexcept { return capacity_ - free_; }
  const std::vector<Extent>& holes() const noexcept { return holes_; }  ///< by address

 private:
  Extent take_from(size_t hole, int64_t bytes);
  size_t smallest_hole_for(int64_t bytes) const;  // holes_.size() where there is none
  size_t largest_hole() const;

  int64_t alignment_;
  int64_t capacity_;
  int64_t free_;
  size_t given_ = 0;  // extents that are out: there is at most one hole more than these
  std::vector<Extent> holes_;
};

}  // namespace infinitybatch::offload
