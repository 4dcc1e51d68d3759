#include "step/wrap_outputs.hpp"

#include "core/bits.hpp"
#include "core/following_dims.hpp"
#include "core/join.hpp"
#include "core/plain_leaves.hpp"
#include "execute/output_law.hpp"

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

bool settled(const std::vector<int64_t>& dims, const std::optional<int64_t>& given) {
  return dims.size() <= 1 || (given && std::find(dims.begin(), dims.end(), *given) != dims.end());
}

int64_t most_dims(const Batch& outputs) {
  int64_t most = 0;
  for (const at::Tensor& tensor : outputs.tensors()) most = std::max(most, tensor.dim());
  return most;
}

constexpr const char* kOneSize =
    " could be the same for any samples, which micro-batches of a single one cannot tell; give a "
    "larger micro_batch_size";

int64_t choose(const std::vector<int64_t>& dims, const at::Tensor& first, int64_t rows,
               const std::optional<int64_t>& given, const std::string& name) {
  if (given && std::find(dims.begin(), dims.end(), *given) != dims.end()) return *given;
  // Of micro-batches of one row a matrix is taken to have its samples first, as is the convention.
  if (dims.size() > 1 && !(first.dim() <= 2 && dims.front() == 0)) {
    throw BatchError(name + " has shape " + shape(first) + " for every micro-batch of " +
                     std::to_string(rows) +
                     " rows, so samples could lie along any of several dimensions; give "
                     "output_batch_dim, or a larger micro_batch_size");
  }
  return dims.front();
}

/// Leaves of all parts that are joined into one.
struct Joining {
  const std::vector<Batch>& parts;
  const std::vector<int64_t>& row_counts;
  size_t leaf;
  bool from_samples;
  int64_t known_dim;  // -1: not known

  /// Places for each sample along the first dimension, where there are several of each.
  int64_t each() const {
    if (tensor(0).dim() == 0) return 1;
    const int64_t places = tensor(0).size(0) / row_counts[0];
    for (size_t i = 0; i < parts.size(); ++i) {
      if (tensor(i).dim() == 0 || tensor(i).size(0) != places * row_counts[i]) return 1;
    }
    return places;
  }

  const at::Tensor& tensor(size_t part) const { return parts[part].leaves()[leaf].tensor; }
  bool several_sizes() const {
    return std::any_of(row_counts.begin(), row_counts.end(),
                       [&](int64_t count) { return count != row_counts.front(); });
  }
  bool alike() const {
    for (size_t i = 1; i < parts.size(); ++i) {
      if (!same_form(tensor(0), tensor(i))) return false;
      if (any_bit_differs(tensor(0), tensor(i)).item<bool>()) return false;
    }
    return true;
  }
};

at::Tensor reduced(const Joining& joining, Reduce reduce, const std::string& name) {
  const at::Tensor& first = joining.tensor(0);
  const auto& [parts, row_counts, leaf, from_samples, known_dim] = joining;
  if (reduce == Reduce::none) {
    throw BatchError(
        name + " is one number for each micro-batch" +
        (from_samples ? "" : ", and not the same one,") +
        " which cannot be joined; say "
        "reduce=\"sum\" or \"mean\" if it is a sum or a mean over samples (a mean over "
        "tokens, some of them ignored, as a language model's own loss is none), or "
        "return one value for each sample");
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

/// The leaf of all rows, and along which dimension they lie. Nothing where it stands once.
std::optional<int64_t> joined_dim(const Joining& joining, const WrapOptions& options,
                                  const std::string& name) {
  const auto& [parts, row_counts, leaf, from_samples, known_dim] = joining;
  const at::Tensor& first = joining.tensor(0);
  const std::vector<int64_t> dims = following_dims(parts, row_counts, leaf);
  const std::optional<int64_t>& given = options.output_batch_dim;
  if (parts.size() == 1) {
    // The whole batch: nothing is joined, nor is its gradient split.
    if (dims.empty()) return std::nullopt;
    const bool fits = given && std::find(dims.begin(), dims.end(), *given) != dims.end();
    return fits ? *given : dims.front();
  }
  if (dims.empty()) {
    if (!from_samples && joining.alike()) {
      if (joining.several_sizes()) return std::nullopt;
      if (first.dim() > 0 || options.reduce == Reduce::none) throw BatchError(name + kOneSize);
    }
    if (first.dim() == 0) return Leaf::kShared;
    if (known_dim == 0 && joining.each() > 1) return 0;
    throw BatchError(name + " has shape " + shape(first) + " for " +
                     std::to_string(row_counts.front()) +
                     " rows: no dimension follows the micro-batch, so the parts cannot be joined; "
                     "return one value for each sample");
  }
  if (dims.size() > 1 && joining.several_sizes()) refuse_compared(parts.front(), leaf);
  // Of another number of rows.
  if (!given && std::find(dims.begin(), dims.end(), known_dim) != dims.end()) return known_dim;
  if (!from_samples && !given && !joining.several_sizes() && joining.alike()) {
    throw BatchError(name + " of shape " + shape(first) + kOneSize +
                     ", or output_batch_dim if it has one for each");
  }
  return choose(dims, first, row_counts.front(), given, name);
}

}  // namespace

bool is_ambiguous(const Batch& outputs, int64_t rows, const std::vector<bool>& from_samples,
                  const WrapOptions& options) {
  if (has_plain_numbers(outputs)) return true;
  for (size_t leaf = 0; leaf < outputs.leaves().size(); ++leaf) {
    if (!outputs.leaves()[leaf].tensor.defined()) continue;
    if (leaf < from_samples.size() && !from_samples[leaf]) return true;
    if (!settled(following_dims({outputs}, {rows}, leaf), options.output_batch_dim)) return true;
  }
  return false;
}

JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const std::vector<bool>& from_samples, const std::vector<int64_t>& known_dims,
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
  check_plain_leaves(parts, row_counts, /*other_sizes=*/false);
  const std::optional<int64_t>& given = options.output_batch_dim;
  if (given && *given >= most_dims(parts.front())) {
    throw InvalidArgument("output_batch_dim is " + std::to_string(*given) +
                          ", but outputs have at most " + std::to_string(most_dims(parts.front())) +
                          " dimensions; count them from the front, starting at 0");
  }
  JoinedOutputs joined;
  joined.once.resize(count, false);
  joined.each.resize(count, 1);
  std::vector<Leaf> leaves = parts.front().leaves();
  for (size_t leaf = 0; leaf < count; ++leaf) {
    const at::Tensor first = leaves[leaf].tensor;
    if (!first.defined()) continue;
    const std::string name = "outputs" + parts.front().structure()->leaf_name(leaf);
    const Joining joining{parts, row_counts, leaf,
                          leaf >= from_samples.size() || from_samples[leaf],
                          leaf < known_dims.size() ? known_dims[leaf] : -1};
    const std::optional<int64_t> dim = joined_dim(joining, options, name);
    joined.once[leaf] = !dim;
    leaves[leaf].batch_dim = dim.value_or(Leaf::kShared);
    if (!dim) {
      leaves[leaf].tensor = first.clone();  // a parameter itself, say, or what a graph has kept
      continue;
    }
    if (*dim == Leaf::kShared) {
      leaves[leaf].tensor = reduced(joining, options.reduce, name);
      continue;
    }
    if (following_dims(parts, row_counts, leaf).empty() && *dim == 0 && parts.size() > 1) {
      joined.each[leaf] = joining.each();
    }
    std::vector<at::Tensor> tensors;
    for (Batch& part : parts) {
      tensors.push_back(std::exchange(part.leaves()[leaf].tensor, at::Tensor()));
    }
    leaves[leaf].tensor = join_rows(tensors, *dim, name);
  }
  joined.whole = Batch(std::move(leaves), parts.front().structure());
  joined.reduce = options.reduce;
  joined.rows = std::accumulate(row_counts.begin(), row_counts.end(), static_cast<int64_t>(0));
  return joined;
}

at::Tensor JoinedOutputs::part_of_gradient(size_t index, const at::Tensor& gradient,
                                           Rows part) const {
  const int64_t dim = whole.leaves()[index].batch_dim;
  if (dim != Leaf::kShared) {
    return gradient.narrow(dim, part.begin * each[index], part.size() * each[index]);
  }
  if (once[index]) return part.begin == 0 ? gradient : at::Tensor();
  if (reduce == Reduce::sum) return gradient;
  return gradient.mul(static_cast<double>(part.size()) / static_cast<double>(rows));
}

Batch JoinedOutputs::part_of(Batch outputs, Rows part) const {
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    Leaf& leaf = outputs.leaves()[i];
    if (each[i] == 1 || !leaf.tensor.defined()) continue;
    leaf.tensor = leaf.tensor.narrow(leaf.batch_dim, part.begin * each[i], part.size() * each[i]);
    leaf.batch_dim = Leaf::kShared;
  }
  return infinitybatch::rows(outputs, part.begin, part.end);
}

}  // namespace infinitybatch
