#include "plan/request.hpp"

#include "execute/schedule.hpp"
#include "plan/packing.hpp"

#include <algorithm>

namespace infinitybatch {

std::vector<int64_t> Request::split(int64_t size, int64_t row) const {
  return packing ? packing->split(row, size) : split_evenly(batch_size - row, size);
}

int64_t Request::count_under(int64_t cap) const {
  return packing ? std::ssize(packing->split(0, cap)) : (batch_size + cap - 1) / cap;
}

int64_t Request::size_under(int64_t cap) const {
  if (packing) return std::min(cap, whole());
  const int64_t count = count_under(cap);
  return (batch_size + count - 1) / count;
}

int64_t Request::whole() const {
  return packing ? packing->size_of(0, batch_size) : batch_size;
}

int64_t Request::unit() const {
  return packing ? plan::Packing::kUnit : 1;
}

std::vector<int64_t> Request::lengths_of(const std::vector<int64_t>& sizes, int64_t row) const {
  std::vector<int64_t> longest;
  if (lengths.empty()) return longest;
  for (const int64_t size : sizes) {
    longest.push_back(lengths[static_cast<size_t>(row)]);
    row += size;
  }
  return longest;
}

}  // namespace infinitybatch
