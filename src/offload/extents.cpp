#include "offload/extents.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <string>

namespace infinitybatch::offload {

Extents::Extents(int64_t capacity, int64_t alignment) : alignment_(alignment) {
  if (capacity < 0 || alignment < 1 || (alignment & (alignment - 1)) != 0) {
    throw InvalidArgument("extents of " + std::to_string(capacity) + " bytes aligned to " +
                          std::to_string(alignment) +
                          " were asked for; the capacity is at least 0, the alignment a power of "
                          "two");
  }
  capacity_ = capacity - capacity % alignment;
  free_ = capacity_;
  if (capacity_ > 0) holes_.push_back({0, capacity_});
}

int64_t Extents::rounded(int64_t bytes) const noexcept {
  return (bytes + alignment_ - 1) / alignment_ * alignment_;
}

size_t Extents::smallest_hole_for(int64_t bytes) const {
  size_t best = holes_.size();
  for (size_t i = 0; i < holes_.size(); ++i) {
    if (holes_[i].bytes < bytes) continue;
    if (best == holes_.size() || holes_[i].bytes < holes_[best].bytes) best = i;
  }
  return best;
}

size_t Extents::largest_hole() const {
  const auto smaller = [](const Extent& a, const Extent& b) { return a.bytes < b.bytes; };
  return static_cast<size_t>(std::max_element(holes_.begin(), holes_.end(), smaller) -
                             holes_.begin());
}

Extent Extents::take_from(size_t hole, int64_t bytes) {
  Extent& from = holes_[hole];
  const Extent taken{from.begin, bytes};
  from.begin += bytes;
  from.bytes -= bytes;
  if (from.bytes == 0) holes_.erase(holes_.begin() + static_cast<std::ptrdiff_t>(hole));
  return taken;
}

std::vector<Extent> Extents::take(int64_t bytes) {
  std::vector<Extent> taken;
  if (bytes <= 0 || bytes > free_) return taken;
  int64_t missing = rounded(bytes);
  // All memory that this or giving back may need is taken first: at most one extent a hole.
  taken.reserve(holes_.size());
  holes_.reserve(given_ + holes_.size() + 1);
  while (missing > 0) {
    size_t hole = smallest_hole_for(missing);
    if (hole == holes_.size()) hole = largest_hole();
    taken.push_back(take_from(hole, std::min(missing, holes_[hole].bytes)));
    missing -= taken.back().bytes;
    free_ -= taken.back().bytes;
  }
  given_ += taken.size();
  return taken;
}

void Extents::give_back(const std::vector<Extent>& extents) noexcept {
  for (const Extent& extent : extents) {
    const auto behind =
        std::lower_bound(holes_.begin(), holes_.end(), extent.begin,
                         [](const Extent& hole, int64_t begin) { return hole.begin < begin; });
    const bool joins_behind =
        behind != holes_.end() && extent.begin + extent.bytes == behind->begin;
    const bool joins_before = behind != holes_.begin() &&
                              std::prev(behind)->begin + std::prev(behind)->bytes == extent.begin;
    if (joins_before && joins_behind) {
      std::prev(behind)->bytes += extent.bytes + behind->bytes;
      holes_.erase(behind);
    } else if (joins_before) {
      std::prev(behind)->bytes += extent.bytes;
    } else if (joins_behind) {
      behind->begin = extent.begin;
      behind->bytes += extent.bytes;
    } else {
      holes_.insert(behind, extent);
    }
    free_ += extent.bytes;
  }
  given_ -= extents.size();
}

}  // namespace infinitybatch::offload
