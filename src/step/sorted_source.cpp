#include "step/sorted_source.hpp"

#include "core/sample_rows.hpp"
#include "execute/copied_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

// What a survey reads at once, about.
constexpr int64_t kSurveyBytes = int64_t{1} << 20;

int64_t bytes_of(const Batch& batch) {
  int64_t bytes = 1;
  for (const at::Tensor& tensor : batch.tensors()) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

/// A tensor of so many times as many rows that occupies no memory for them.
at::Tensor shape_alone(const Leaf& row, int64_t rows) {
  std::vector<int64_t> sizes = row.tensor.sizes().vec();
  sizes[static_cast<size_t>(row.batch_dim)] *= rows;
  at::Tensor shape = at::empty({1}, row.tensor.options().requires_grad(false)).expand(sizes);
  if (row.tensor.requires_grad()) shape.set_requires_grad(true);
  return shape;
}

/// These rows of the source, in this order. Nothing where they come in other shapes than `dims`.
std::optional<Batch> gathered(const BatchSource& source, const Dims& dims,
                              const std::vector<int64_t>& wanted) {
  const size_t count = wanted.size();
  std::vector<size_t> rising(count);
  std::iota(rising.begin(), rising.end(), size_t{0});
  std::sort(rising.begin(), rising.end(),
            [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  std::vector<Batch> parts;
  std::vector<int64_t> place(count);  // of each wanted row among those that are read
  for (size_t begin = 0; begin < count;) {
    size_t end = begin + 1;
    while (end < count && wanted[rising[end]] == wanted[rising[end - 1]] + 1) ++end;
    const int64_t first = wanted[rising[begin]];
    const auto length = static_cast<int64_t>(end - begin);
    // It may make every piece in one buffer.
    parts.push_back(copied(source.rows(first, first + length)));
    if (dims_of(parts.back()) != dims) return std::nullopt;
    for (size_t i = begin; i < end; ++i) place[rising[i]] = static_cast<int64_t>(i);
    begin = end;
  }
  if (parts.front().tensors().empty()) return parts.front();
  Batch together;
  if (parts.size() == 1) {
    together = std::move(parts.front());
  } else {
    const Batch like = parts.front();
    std::vector<Leaf> leaves = like.leaves();
    for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      if (!leaves[leaf].tensor.defined() || leaves[leaf].batch_dim == Leaf::kShared) continue;
      std::vector<at::Tensor> pieces;
      for (const Batch& part : parts) pieces.push_back(part.leaves()[leaf].tensor);
      leaves[leaf].tensor = at::cat(pieces, leaves[leaf].batch_dim);
    }
    together = Batch(std::move(leaves), like.structure());
  }
  return std::is_sorted(place.begin(), place.end()) ? together : in_order(together, place);
}

}  // namespace

std::optional<Batch> survey(const BatchSource& source,
                            const std::function<bool(const Batch&, size_t leaf)>& tells) {
  if (source.size < 1) return std::nullopt;
  const at::NoGradGuard no_grad;
  const Batch first = copied(source.rows(0, 1));
  const Dims dims = dims_of(first);
  std::vector<Leaf> leaves = first.leaves();
  std::vector<std::vector<at::Tensor>> told(leaves.size());
  const int64_t piece = std::clamp<int64_t>(kSurveyBytes / bytes_of(first), 1, source.size);
  for (int64_t begin = 0; begin < source.size; begin += piece) {
    const Batch part = source.rows(begin, std::min(begin + piece, source.size));
    if (part.leaves().size() != leaves.size() || dims_of(part) != dims) return std::nullopt;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const Leaf& leaf = part.leaves()[i];
      if (leaf.batch_dim != leaves[i].batch_dim || leaf.places != 1) return std::nullopt;
      if (leaf.tensor.defined() && tells(part, i)) told[i].push_back(leaf.tensor.clone());
    }
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    Leaf& leaf = leaves[i];
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    leaf.tensor =
        told[i].empty() ? shape_alone(leaf, source.size) : at::cat(told[i], leaf.batch_dim);
  }
  return Batch(std::move(leaves), first.structure());
}

BatchSource sorted_rows(const BatchSource& given, const Dims& dims,
                        std::shared_ptr<const Trimming> trimming) {
  BatchSource sorted = given;
  sorted.rows = [given, dims, trimming = std::move(trimming)](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    const std::vector<int64_t> samples = trimming->samples({begin, end});
    if (std::optional<Batch> rows = gathered(given, dims, samples)) return *std::move(rows);
    // Rows that are padded to the longest of those that are asked for.
    return in_order(given.rows(0, given.size), samples);
  };
  return sorted;
}

}  // namespace infinitybatch
