#include "plan/request.hpp"

#include "execute/schedule.hpp"
#include "plan/packing.hpp"

#include <algorithm>

namespace infinitybatch {

std::vector<int64_t> Request::split(int64_t size, int64_t row) const {
  return packing ? packing->split(row, size) : split_evenly(batch_size - row, size);
}

bool Request::is_alike(const Request& other) const {
  return signature == other.signature && dims == other.dims && lengths == other.lengths &&
         reordered == other.reordered && batch_size == other.batch_size &&
         budget_bytes == other.budget_bytes && whole_batch_only == other.whole_batch_only &&
         fails_on == other.fails_on;
}

bool Request::differs_in_kept_alone(const Request& other) const {
  const auto rest = [](const Request& request) {
    return request.signature.substr(0, request.signature.find("|keeps"));
  };
  return kept != other.kept && batch_size == other.batch_size && dims == other.dims &&
         rest(*this) == rest(other);
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
