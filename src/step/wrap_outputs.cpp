#include "wrap_outputs.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace infinitybatch {
namespace {

std::string shape(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

/// Dimensions along which every part has its number of rows.
std::vector<int64_t> fitting(const std::vector<Batch>& parts,
                             const std::vector<int64_t>& row_counts, size_t leaf) {
  const int64_t count = parts.front().leaves()[leaf].tensor.dim();
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < count; ++dim) {
    bool fits = true;
    for (size_t i = 0; i < parts.size() && fits; ++i) {
      const at::Tensor& part = parts[i].leaves()[leaf].tensor;
      fits = part.dim() == count && part.size(dim) == row_counts[i];
    }
    if (fits) dims.push_back(dim);
  }
  return dims;
}

bool settled(const std::vector<int64_t>& dims, const std::optional<int64_t>& given) {
  return dims.size() <= 1 || (given && std::find(dims.begin(), dims.end(), *given) != dims.end());
}

int64_t choose(const std::vector<int64_t>& dims, const at::Tensor& first, int64_t rows,
               const std::optional<int64_t>& given, const std::string& name) {
  if (given && std::find(dims.begin(), dims.end(), *given) != dims.end()) return *given;
  if (dims.empty()) {
    throw BatchError(name + " has shape " + shape(first) + " for " + std::to_string(rows) +
                     " rows: no dimension follows the micro-batch, so the parts cannot be joined; "
                     "return one value for each sample");
  }
  // Of micro-batches of one row a matrix is taken to have its samples first, as is the convention.
  if (dims.size() > 1 && !(first.dim() <= 2 && dims.front() == 0)) {
    throw BatchError(name + " has shape " + shape(first) + " for every micro-batch of " +
                     std::to_string(rows) +
                     " rows, so samples could lie along any of several dimensions; give "
                     "output_batch_dim, or a larger micro_batch_size");
  }
  return dims.front();
}

at::Tensor reduced(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                   size_t leaf, Reduce reduce, const std::string& name) {
  const at::Tensor& first = parts.front().leaves()[leaf].tensor;
  if (reduce == Reduce::none) {
    throw BatchError(name +
                     " is one number for each micro-batch, which cannot be joined; say "
                     "reduce=\"sum\" or \"mean\" if it is a sum or a mean over samples, or return "
                     "one value for each sample");
  }
  if (reduce == Reduce::mean && !first.is_floating_point() && !first.is_complex()) {
    throw BatchError(name +
                     " is a whole number, of which no mean can be taken; return it as a "
                     "floating point number, or say reduce=\"sum\"");
  }
  const double total = static_cast<double>(
      std::accumulate(row_counts.begin(), row_counts.end(), static_cast<int64_t>(0)));
  at::Tensor sum;
  for (size_t i = 0; i < parts.size(); ++i) {
    at::Tensor term = parts[i].leaves()[leaf].tensor;
    if (reduce == Reduce::mean) term = term.mul(static_cast<double>(row_counts[i]) / total);
    sum = sum.defined() ? sum.add(term) : term;
  }
  return sum;
}

}  // namespace

bool is_ambiguous(const Batch& outputs, int64_t rows, const WrapOptions& options) {
  for (size_t leaf = 0; leaf < outputs.leaves().size(); ++leaf) {
    if (!outputs.leaves()[leaf].tensor.defined()) continue;
    if (!settled(fitting({outputs}, {rows}, leaf), options.output_batch_dim)) return true;
  }
  return false;
}

JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const WrapOptions& options) {
  const size_t count = parts.front().leaves().size();
  for (const Batch& part : parts) {
    bool alike = part.leaves().size() == count;
    for (size_t leaf = 0; alike && leaf < count; ++leaf) {
      alike = part.leaves()[leaf].tensor.defined() == parts[0].leaves()[leaf].tensor.defined();
    }
    if (!alike) {
      throw BatchError(
          "outputs of different micro-batches have different structures, so they cannot be joined; "
          "return the same ones for every batch");
    }
  }
  std::vector<Leaf> leaves = parts.front().leaves();
  for (size_t leaf = 0; leaf < count; ++leaf) {
    const at::Tensor first = leaves[leaf].tensor;
    if (!first.defined()) continue;
    const std::string name = "outputs" + parts.front().structure()->leaf_name(leaf);
    if (first.dim() == 0) {
      leaves[leaf].tensor = reduced(parts, row_counts, leaf, options.reduce, name);
      leaves[leaf].batch_dim = Leaf::kShared;
      continue;
    }
    const int64_t dim = choose(fitting(parts, row_counts, leaf), first, row_counts.front(),
                               options.output_batch_dim, name);
    std::vector<at::Tensor> tensors;
    for (Batch& part : parts) {
      tensors.push_back(std::exchange(part.leaves()[leaf].tensor, at::Tensor()));
    }
    leaves[leaf].tensor = at::cat(tensors, dim);
    leaves[leaf].batch_dim = dim;
  }
  JoinedOutputs joined;
  joined.whole = Batch(std::move(leaves), parts.front().structure());
  joined.reduce = options.reduce;
  joined.rows = std::accumulate(row_counts.begin(), row_counts.end(), static_cast<int64_t>(0));
  return joined;
}

at::Tensor JoinedOutputs::part_of_gradient(size_t index, const at::Tensor& gradient,
                                           Rows part) const {
  const int64_t dim = whole.leaves()[index].batch_dim;
  if (dim != Leaf::kShared) return gradient.narrow(dim, part.begin, part.size());
  if (reduce == Reduce::sum) return gradient;
  return gradient.mul(static_cast<double>(part.size()) / static_cast<double>(rows));
}

}  // namespace infinitybatch
