#include "memory/seams.hpp"

#include <algorithm>

namespace infinitybatch::memory {

void Seams::add(char* begin, size_t bytes) noexcept {
  remove(begin, bytes);  // of pages that another thread gave back without a word
  add(begin);
  add(begin + bytes);
}

void Seams::add(char* seam) noexcept {
  char** const end = sorted_.begin() + count_;
  char** const place = std::lower_bound(sorted_.begin(), end, seam);
  if (place != end && *place == seam) return;
  if (count_ == kMost) {
    lost_ = true;
    return;
  }
  std::copy_backward(place, end, end + 1);
  *place = seam;
  ++count_;
}

void Seams::remove(char* begin, size_t bytes) noexcept {
  char** const end = sorted_.begin() + count_;
  char** const first = std::lower_bound(sorted_.begin(), end, begin);
  char** const behind = std::upper_bound(first, end, begin + bytes);
  if (behind == first) return;
  std::copy(behind, end, first);
  count_ -= static_cast<size_t>(behind - first);
}

size_t Seams::in_front(char* end, size_t at_most) const noexcept {
  char* const* const behind = std::lower_bound(sorted_.begin(), sorted_.begin() + count_, end);
  if (behind == sorted_.begin()) return at_most;
  return std::min(at_most, static_cast<size_t>(end - behind[-1]));
}

}  // namespace infinitybatch::memory
