#include "core/memory_order.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace infinitybatch {
namespace {

/// As `at::infer_dense_strides` compares: above 0 where `a` lies outside of `b`, below where
/// inside.
int64_t compare(c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t a, size_t b) {
  if (strides[a] == 0 || strides[b] == 0) return 0;
  if (strides[a] != strides[b]) return strides[a] < strides[b] ? -1 : 1;
  return sizes[a] > sizes[b] ? 1 : 0;
}

}  // namespace

std::vector<int64_t> memory_order(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<int64_t> order(sizes.size());  // the innermost first, until the end
  std::iota(order.rbegin(), order.rend(), int64_t{0});
  for (size_t i = 1; i < order.size(); ++i) {
    size_t place = i;
    for (size_t j = i; j-- > 0;) {
      const int64_t told =
          compare(sizes, strides, static_cast<size_t>(order[j]), static_cast<size_t>(order[place]));
      if (told < 0) break;
      if (told > 0) {
        std::swap(order[j], order[place]);
        place = j;
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

std::string layout_of(const at::Tensor& tensor, int64_t dim) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested()) return "";
  // Of one element along a dimension its stride says nothing.
  std::vector<int64_t> order;
  for (const int64_t each : memory_order(tensor.sizes(), tensor.strides())) {
    if (each == dim || tensor.size(each) != 1) order.push_back(each);
  }
  std::string text;
  if (!std::is_sorted(order.begin(), order.end())) {
    for (const int64_t each : order) text += std::to_string(each) + ".";
  }
  for (const int64_t each : order) {
    if (tensor.stride(each) == 0) text += std::to_string(each) + " expanded ";
  }
  if (!tensor.is_non_overlapping_and_dense()) text += "apart";
  return text;
}

std::string layouts_of(const Batch& batch) {
  std::string text;
  for (size_t i = 0; i < batch.leaves().size(); ++i) {
    const Leaf& leaf = batch.leaves()[i];
    const std::string own = layout_of(leaf.tensor, leaf.batch_dim);
    if (!own.empty()) text += "|" + std::to_string(i) + " lies " + own;
  }
  return text;
}

}  // namespace infinitybatch
