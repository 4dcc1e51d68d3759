#include "execute/shared_outputs.hpp"

#include "core/extent.hpp"
#include "core/tensor_parts.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace infinitybatch {
namespace {

// Beyond it what interleaves in an unusual way is taken to overlap.
constexpr int64_t kCompared = 1 << 20;

/// Elements of a storage that a strided tensor has, in elements.
struct Places {
  int64_t begin;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size

  explicit Places(const at::Tensor& tensor) : begin(tensor.storage_offset()) {
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
    }
    std::sort(dims.rbegin(), dims.rend());
  }
  int64_t end() const {
    int64_t last = begin;
    for (const auto& [stride, size] : dims) last += stride * (size - 1);
    return last + 1;
  }
  std::vector<int64_t> all() const {
    std::vector<int64_t> places{begin};
    for (const auto& [stride, size] : dims) {
      const size_t count = places.size();
      for (int64_t i = 1; i < size; ++i) {
        for (size_t p = 0; p < count; ++p) places.push_back(places[p] + i * stride);
      }
    }
    std::sort(places.begin(), places.end());
    return places;
  }
  int64_t count() const {
    return std::accumulate(dims.begin(), dims.end(), int64_t{1},
                           [](int64_t product, const auto& dim) { return product * dim.second; });
  }
};

bool share_elements(const at::Tensor& a, const at::Tensor& b) {
  const auto [begin, end] = extent_of(a);
  const auto [other_begin, other_end] = extent_of(b);
  if (end <= other_begin || other_end <= begin) return false;
  if (a.element_size() != b.element_size()) return true;
  Places x(a);
  Places y(b);
  // Rows of both that lie side by side in the same way meet where their first ones do.
  while (!x.dims.empty() && !y.dims.empty() && x.dims.front() == y.dims.front()) {
    const int64_t stride = x.dims.front().first;
    Places row = x;
    Places other = y;
    row.dims.erase(row.dims.begin());
    other.dims.erase(other.dims.begin());
    if (std::max(row.end(), other.end()) - std::min(row.begin, other.begin) > stride) break;
    x = std::move(row);
    y = std::move(other);
  }
  if (x.end() <= y.begin || y.end() <= x.begin) return false;
  if (x.count() > kCompared || y.count() > kCompared) return true;
  const std::vector<int64_t> left = x.all();
  const std::vector<int64_t> right = y.all();
  std::vector<int64_t> both;
  std::set_intersection(left.begin(), left.end(), right.begin(), right.end(),
                        std::back_inserter(both));
  return !both.empty();
}

}  // namespace

void SharedOutputs::meet(const Batch& outputs, bool sure) {
  const std::vector<Leaf>& leaves = outputs.leaves();
  const bool first = first_.empty();
  if (!first && leaves.size() != first_.size()) return;  // cannot be joined
  std::vector<size_t> same(leaves.size());
  std::vector<bool> overlap(leaves.size());
  std::unordered_map<const void*, std::vector<size_t>> by_memory;
  for (size_t i = 0; i < leaves.size(); ++i) {
    same[i] = i;
    const at::Tensor& tensor = leaves[i].tensor;
    if (!tensor.defined() || !is_plain(tensor)) continue;
    std::vector<size_t>& others = by_memory[tensor.storage().unsafeGetStorageImpl()];
    for (const size_t other : others) {
      if (tensor.is_same(leaves[other].tensor)) {
        same[i] = other;
        if (!sure) overlap[i] = overlap[other] = true;
      } else if (share_elements(leaves[other].tensor, tensor)) {
        overlap[i] = overlap[other] = true;
      }
    }
    if (same[i] == i) others.push_back(i);
  }
  if (first) {
    first_ = same;
    overlaps_.resize(leaves.size());
    may_overlap_.resize(leaves.size());
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (first_[i] != same[i]) {
      if (sure && sure_) overlap[i] = overlap[std::min(first_[i], same[i])] = true;
      first_[i] = i;
    }
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    std::vector<bool>& known = sure ? overlaps_ : may_overlap_;
    known[i] = known[i] || overlap[i];
  }
  sure_ = sure_ || sure;
}

bool SharedOutputs::overlaps(size_t leaf) const {
  return leaf < first_.size() && (sure_ ? overlaps_[leaf] : may_overlap_[leaf]);
}

}  // namespace infinitybatch
