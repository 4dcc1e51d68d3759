#include "step/wrap_outputs.hpp"

#include "core/bits.hpp"
#include "core/following_dims.hpp"
#include "core/join.hpp"
#include "core/plain_leaves.hpp"
#include "core/sample_dims.hpp"
#include "core/sample_rows.hpp"
#include "core/squeezed.hpp"
#include "execute/output_law.hpp"
#include "execute/rows_seen.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
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
  int64_t known_dim;  // see `RowsSeen::dims`
  const BatchSource& inputs;

  /// Whether rows were seen to lie along the first dimension, several of each sample.
  bool flattened() const {
    if (known_dim != 0 && known_dim != kInterleaved) return false;
    return tensor(0).dim() > 0 && tensor(0).size(0) >= 2 * row_counts[0];
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

/// See `JoinedOutputs::shares`.
std::vector<at::Tensor> shares_of(const Joining& joining,
                                  const std::vector<std::vector<OwnLoss>>& losses, Reduce reduce,
                                  const std::string& name) {
  const at::Tensor& first = joining.tensor(0);
  std::vector<OwnLoss> here;
  for (const std::vector<OwnLoss>& part : losses) here.push_back(part.at(joining.leaf));
  here.resize(joining.parts.size());
  std::vector<at::Tensor> shares = infinitybatch::shares_of(here, joining.row_counts, reduce);
  if (shares.empty()) {
    throw BatchError(
        name + " is one number for each micro-batch" +
        (joining.from_samples ? "" : ", and not the same one,") +
        " which cannot be joined; say "
        "reduce=\"sum\" or \"mean\" if it is a sum or a mean over samples, or return one value for "
        "each sample. (A cross entropy's own mean or sum need not be said where forward returns it "
        "as it is)" +
        (joining.row_counts.front() == 1 ? std::string(". Where it is squeezed: ") + kSqueezed
                                         : ""));
  }
  if (reduce == Reduce::mean && !first.is_floating_point() && !first.is_complex()) {
    throw BatchError(name +
                     " is a whole number, of which no mean can be taken; return it as a "
                     "floating point number, or say reduce=\"sum\"");
  }
  return shares;
}

/// Along which dimension samples lie in a leaf that has one place for each. Nothing where it stands
/// once.
std::optional<int64_t> joined_dim(const Joining& joining, const WrapOptions& options,
                                  const std::string& name) {
  const auto& [parts, row_counts, leaf, from_samples, known_dim, inputs] = joining;
  const at::Tensor& first = joining.tensor(0);
  const std::vector<int64_t> dims = following_dims(parts, row_counts, leaf);
  const std::optional<int64_t>& given = options.output_batch_dim;
  if (parts.size() == 1) {
    // The whole batch: nothing is joined, nor is its gradient split.
    if (dims.empty()) return std::nullopt;
    const bool fits = given && std::find(dims.begin(), dims.end(), *given) != dims.end();
    return fits ? *given : dims.front();
  }
  // One sample has as many rows as a tensor of one element: other numbers of rows have told.
  if (!from_samples && known_dim == kOnce && joining.alike()) return std::nullopt;
  if (dims.empty()) {
    if (!from_samples && joining.alike()) {
      if (joining.several_sizes()) return std::nullopt;
      if (first.dim() > 0 || options.reduce == Reduce::none) throw BatchError(name + kOneSize);
    }
    if (first.dim() == 0) return Leaf::kShared;
    const std::string advice = time_first_advice(inputs.rows(0, 1));
    throw BatchError(name + " has shape " + shape(first) + " for " +
                     std::to_string(row_counts.front()) +
                     " rows: no dimension follows the micro-batch, so the parts cannot be joined; "
                     "return one value for each sample (a list with a tensor for each as "
                     "torch.stack(outputs)); " +
                     (advice.empty() ? "" : advice + "; ") +
                     "where time and batch are flattened, return [time, batch, ...] and flatten "
                     "that behind the model");
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
                  const std::vector<int64_t>& known_dims, const WrapOptions& options) {
  if (has_plain_numbers(outputs)) return true;
  for (size_t leaf = 0; leaf < outputs.leaves().size(); ++leaf) {
    if (!outputs.leaves()[leaf].tensor.defined()) continue;
    if (leaf < from_samples.size() && !from_samples[leaf]) return true;
    const std::vector<int64_t> dims = following_dims({outputs}, {rows}, leaf);
    if (!settled(dims, options.output_batch_dim)) return true;
    // By chance, where several rows of each sample lie along the first one.
    const int64_t first =
        outputs.leaves()[leaf].tensor.dim() > 0 ? outputs.leaves()[leaf].tensor.size(0) : 0;
    const bool known = leaf < known_dims.size() && known_dims[leaf] != -1;
    if (!known && !dims.empty() && dims.front() > 0 && first > rows && first % rows == 0) {
      return true;
    }
  }
  return false;
}

JoinedOutputs join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                   const std::vector<bool>& from_samples, const std::vector<int64_t>& known_dims,
                   const std::vector<std::vector<OwnLoss>>& losses, const WrapOptions& options,
                   const BatchSource& inputs) {
  const size_t count = parts.front().leaves().size();
  for (const Batch& part : parts) {
    bool alike = part.leaves().size() == count;
    for (size_t leaf = 0; alike && leaf < count; ++leaf) {
      alike = part.leaves()[leaf].tensor.defined() == parts[0].leaves()[leaf].tensor.defined();
    }
    if (!alike) {
      throw BatchError(
          "outputs of different micro-batches have different structures, so they cannot be joined; "
          "return the same ones for every batch, and one tensor, as in torch.stack(outputs), in "
          "place of a list with a tensor for each sample");
    }
  }
  refuse_squeezed(parts, row_counts, "outputs");
  check_plain_leaves(parts, row_counts, /*other_sizes=*/false);
  const std::optional<int64_t>& given = options.output_batch_dim;
  if (given && *given >= most_dims(parts.front())) {
    throw InvalidArgument("output_batch_dim is " + std::to_string(*given) +
                          ", but outputs have at most " + std::to_string(most_dims(parts.front())) +
                          " dimensions; count them from the front, starting at 0");
  }
  JoinedOutputs joined;
  joined.once.resize(count, false);
  joined.shares.resize(count);
  std::vector<Leaf> leaves = parts.front().leaves();
  for (size_t leaf = 0; leaf < count; ++leaf) {
    const at::Tensor first = leaves[leaf].tensor;
    if (!first.defined()) continue;
    const std::string name = "outputs" + parts.front().structure()->leaf_name(leaf);
    const Joining joining{parts,
                          row_counts,
                          leaf,
                          leaf >= from_samples.size() || from_samples[leaf],
                          leaf < known_dims.size() ? known_dims[leaf] : -1,
                          inputs};
    const bool flattened = parts.size() > 1 && joining.flattened();
    const std::optional<int64_t> dim = flattened ? 0 : joined_dim(joining, options, name);
    joined.once[leaf] = !dim;
    leaves[leaf].batch_dim = dim.value_or(Leaf::kShared);
    if (!dim) {
      leaves[leaf].tensor = first.clone();  // a parameter itself, say, or what a graph has kept
      continue;
    }
    if (*dim == Leaf::kShared) {
      const std::vector<at::Tensor> shares = shares_of(joining, losses, options.reduce, name);
      std::vector<at::Tensor> numbers;
      int64_t row = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        numbers.push_back(joining.tensor(i));
        joined.shares[leaf].emplace(row, shares[i]);
        row += row_counts[i];
      }
      leaves[leaf].tensor = reduced(numbers, shares);
      continue;
    }
    std::vector<at::Tensor> tensors;
    for (Batch& part : parts) {
      tensors.push_back(std::exchange(part.leaves()[leaf].tensor, at::Tensor()));
    }
    if (flattened) {
      leaves[leaf].places = places_of(tensors, row_counts, name);
      leaves[leaf].interleaved = joining.known_dim == kInterleaved;
    }
    leaves[leaf].tensor = join_rows(tensors, leaves[leaf], name);
  }
  joined.whole = Batch(std::move(leaves), parts.front().structure());
  return joined;
}

at::Tensor JoinedOutputs::part_of_gradient(size_t index, const at::Tensor& gradient,
                                           Rows part) const {
  const Leaf& like = whole.leaves()[index];
  if (like.batch_dim != Leaf::kShared) return rows_of(gradient, like, part);
  if (once[index]) return part.begin == 0 ? gradient : at::Tensor();
  return gradient.mul(shares[index].at(part.begin));
}

std::vector<at::Tensor> shares_of(const std::vector<OwnLoss>& losses,
                                  const std::vector<int64_t>& row_counts, Reduce reduce) {
  const auto all = [&](OwnLoss::Kind kind) {
    return std::all_of(losses.begin(), losses.end(),
                       [&](const OwnLoss& each) { return each.kind == kind; });
  };
  const bool weighed = reduce != Reduce::sum && all(OwnLoss::Kind::mean);
  const bool summed = reduce == Reduce::sum || (reduce == Reduce::none && all(OwnLoss::Kind::sum));
  if (reduce == Reduce::none && !weighed && !summed) return {};
  std::vector<at::Tensor> shares;
  at::Tensor total;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (weighed) {
      const at::Tensor& weight = losses[i].weight;
      shares.push_back(weight.to(weight.is_mps() ? at::kFloat : at::kDouble));
    } else {
      shares.push_back(at::scalar_tensor(summed ? 1.0 : static_cast<double>(row_counts[i]),
                                         at::TensorOptions().dtype(at::kDouble)));
    }
    total = total.defined() ? total.add(shares.back()) : shares.back();
  }
  if (summed) return shares;
  for (at::Tensor& share : shares) share = share.div(total);
  return shares;
}

at::Tensor reduced(const std::vector<at::Tensor>& numbers, const std::vector<at::Tensor>& shares) {
  const at::ScalarType type = numbers.front().scalar_type();
  at::Tensor sum;
  for (size_t i = 0; i < numbers.size(); ++i) {
    at::Tensor term = numbers[i].mul(shares[i]);
    // A mean over nothing is NaN, and no part of the mean over all.
    term = term.masked_fill(shares[i].eq(0).to(term.device()), 0);
    sum = sum.defined() ? sum.add(term) : term;
  }
  return sum.to(type);
}

}  // namespace infinitybatch
