#include "core/sample_dims.hpp"

#include <algorithm>
#include <vector>

namespace infinitybatch {
namespace {

bool is_unmarked(const Leaf& leaf) {
  return leaf.tensor.defined() && !leaf.marked && leaf.batch_dim == 0;
}

/// A key as it is given to batch_dim, where the leaf is an argument itself.
std::string argument_key(const std::string& path) {
  if (path.starts_with("['") && path.find("']") == path.size() - 2) {
    return "\"" + path.substr(2, path.size() - 4) + "\"";
  }
  return "";
}

/// Of [N, features] the second dimension holds features, of [N, C, H, W] channels.
bool is_time_first(const Leaf& leaf) {
  return is_unmarked(leaf) && (leaf.tensor.dim() == 3 ||
                               (leaf.tensor.dim() == 2 && leaf.tensor.scalar_type() == at::kLong));
}

}  // namespace

int64_t dimension_of(const Leaf& leaf, int64_t size) {
  for (int64_t d = 0; d < leaf.tensor.dim(); ++d) {
    if (d != leaf.batch_dim && leaf.tensor.size(d) == size) return d;
  }
  return -1;
}

int64_t second_size(const Batch& batch) {
  int64_t size = -1;
  for (const int64_t least : {2, 1}) {  // a vector, as of lengths, has samples along its only one
    for (const Leaf& leaf : batch.leaves()) {
      if (!leaf.tensor.defined() || leaf.marked || leaf.tensor.dim() < least) continue;
      const int64_t here = leaf.tensor.size(std::min<int64_t>(1, leaf.tensor.dim() - 1));
      if (size >= 0 && here != size) return -1;
      if (least == 2) size = here;
    }
  }
  return size;
}

int64_t time_first_size(const Batch& batch) {
  const std::vector<Leaf>& leaves = batch.leaves();
  if (!std::any_of(leaves.begin(), leaves.end(), is_time_first)) return -1;
  const int64_t size = second_size(batch);
  return size > 1 ? size : -1;
}

std::string time_first_advice(const Batch& batch) {
  const int64_t samples = time_first_size(batch);
  if (samples < 0) return "";
  return "for a batch of " + std::to_string(samples) +
         " samples along dimension 1 of all inputs (time first), say batch_dim=1";
}

std::string batch_dim_of(const Batch& batch, size_t leaf, int64_t dim) {
  const std::string key = argument_key(batch.structure()->leaf_name(leaf));
  return key.empty() ? "ib.batch_dim(x, " + std::to_string(dim) + ")"
                     : "batch_dim={" + key + ": " + std::to_string(dim) + "}";
}

std::string marks_that_fit(const Batch& batch, std::string_view name, int64_t samples) {
  std::string text;
  const std::vector<Leaf>& leaves = batch.leaves();
  for (size_t i = 0; i < leaves.size() && text.empty(); ++i) {
    const int64_t dim = is_unmarked(leaves[i]) ? dimension_of(leaves[i], samples) : -1;
    if (dim < 0) continue;
    text = " If the samples of " + std::string(name) + batch.structure()->leaf_name(i) +
           " lie along dimension " + std::to_string(dim) + ", say so, " +
           batch_dim_of(batch, i, dim) + ".";
  }
  if (const std::string advice = time_first_advice(batch); text.empty() && !advice.empty()) {
    text = " F" + advice.substr(1) + ".";
  }
  if (std::count_if(leaves.begin(), leaves.end(), is_unmarked) > 1) {
    text += " Mark what every sample needs whole (positions, a mask), ib.shared(x).";
  }
  return text;
}

}  // namespace infinitybatch
