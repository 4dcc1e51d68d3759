// Splitting and joining: sizes, rows and devices of a Batch.
#include "core/following_dims.hpp"
#include "core/join.hpp"
#include "core/kept_batch.hpp"
#include "core/memory_order.hpp"
#include "core/pinned_copies.hpp"
#include "core/plain_leaves.hpp"
#include "core/sample_dims.hpp"
#include "core/sample_rows.hpp"
#include "core/squeezed.hpp"
#include "core/tensor_parts.hpp"
#include "core/transforms.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <optional>
#include <sstream>
#include <utility>

namespace infinitybatch {
namespace {

std::string describe(std::string_view name, const Batch& batch, size_t leaf) {
  return std::string(name) + batch.structure()->leaf_name(leaf);
}

std::string shape(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

/// The size of one leaf along its batch dimension.
int64_t leaf_size(const Batch& batch, size_t index, std::string_view name) {
  const Leaf& leaf = batch.leaves()[index];
  if (leaf.tensor.dim() == 0) {
    throw BatchError(
        describe(name, batch, index) +
        " is a 0-dimensional tensor and has no batch dimension; mark it, ib.shared(x), so that "
        "every micro-batch sees it whole");
  }
  if (leaf.batch_dim >= leaf.tensor.dim()) {
    throw BatchError(describe(name, batch, index) + " has shape " + shape(leaf.tensor) +
                     ", which has no dimension " + std::to_string(leaf.batch_dim) +
                     " to split; give this leaf another batch_dim");
  }
  return leaf.tensor.size(leaf.batch_dim) / leaf.places;
}

/// Whether the leaves differ in their rows alone, as a list of samples of other lengths.
bool may_be_samples(const Batch& batch) {
  const Leaf* first = nullptr;
  size_t count = 0;
  for (const Leaf& leaf : batch.leaves()) {
    if (!leaf.tensor.defined() || leaf.tensor.dim() == 0) return false;
    if (!first) first = &leaf;
    if (leaf.tensor.scalar_type() != first->tensor.scalar_type() ||
        leaf.tensor.sizes().slice(1) != first->tensor.sizes().slice(1)) {
      return false;
    }
    ++count;
  }
  return count > 2;
}

/// Two leaves of which the second counts the entries of the first that are each sample's, as the
/// concatenated targets of CTC have them; nothing where there are none.
std::optional<std::pair<size_t, size_t>> find_concatenated(const Batch& batch) {
  const auto is_numbers = [](const Leaf& leaf) {
    return leaf.tensor.defined() && !leaf.marked && leaf.tensor.dim() == 1 &&
           !leaf.tensor.is_meta() && c10::isIntegralType(leaf.tensor.scalar_type(), false);
  };
  const std::vector<Leaf>& leaves = batch.leaves();
  for (size_t all = 0; all < leaves.size(); ++all) {
    for (size_t each = 0; each < leaves.size(); ++each) {
      if (!is_numbers(leaves[all]) || !is_numbers(leaves[each])) continue;
      const int64_t entries = leaves[all].tensor.size(0);
      if (entries == leaves[each].tensor.size(0)) continue;
      if (leaves[each].tensor.sum().item<int64_t>() == entries) return std::pair(all, each);
    }
  }
  return std::nullopt;
}

/// Whether whole numbers may be numbers of samples, as the edges of a graph are.
bool may_be_indices(const at::Tensor& tensor, int64_t samples) {
  if (tensor.scalar_type() != at::kLong && tensor.scalar_type() != at::kInt) return false;
  if (tensor.dim() != 2 || tensor.size(0) != 2 || tensor.numel() == 0 || tensor.is_meta()) {
    return false;
  }
  return tensor.min().item<int64_t>() >= 0 && tensor.max().item<int64_t>() < samples;
}

/// What to do where leaf `i` has `here` samples and leaf `first` has `size`.
std::string advice(const Batch& batch, std::string_view name, size_t first, int64_t size, size_t i,
                   int64_t here) {
  for (const auto& [leaf, wanted] : {std::pair(i, size), std::pair(first, here)}) {
    const at::Tensor& tensor = batch.leaves()[leaf].tensor;
    if (may_be_indices(tensor, wanted)) {
      return describe(name, batch, leaf) + " has shape " + shape(tensor) +
             " and may hold numbers of samples (the edges of a graph), which cannot be split: give "
             "whole graphs as samples, [graphs, nodes, ...], or run this model as it is";
    }
  }
  if (const auto found = find_concatenated(batch)) {
    const std::string all = describe(name, batch, found->first);
    return all + " has the entries of all samples one behind the other, as many of each as " +
           describe(name, batch, found->second) + " says; give " + all +
           " as ib.losses.pad_ctc_targets(" + all + ", " + describe(name, batch, found->second) +
           ")";
  }
  if (may_be_samples(batch)) {
    return "a list of samples is not split: pad them to one size and give one tensor, "
           "torch.nn.utils.rnn.pad_sequence(" +
           std::string(name) + ", batch_first=True), with a tensor of their lengths beside it";
  }
  const std::string shared = "mark what every sample needs whole (positions, a mask), ib.shared(x)";
  const Leaf& leaf = batch.leaves()[i];
  const bool may_be_positions =
      leaf.tensor.dim() == 1 || leaf.tensor.size(0) == leaf.tensor.size(1);
  const int64_t along = dimension_of(leaf, size);
  const int64_t other = dimension_of(batch.leaves()[first], here);
  std::string text;
  if (along < 0 && other >= 0 && may_be_positions) {
    text = shared;
  } else if (along >= 0 || other >= 0) {
    const size_t told = along >= 0 ? i : first;
    const int64_t dim = along >= 0 ? along : other;
    text = "if the samples of " + describe(name, batch, told) + " " +
           shape(batch.leaves()[told].tensor) + " lie along dimension " + std::to_string(dim) +
           ", say so, " + batch_dim_of(batch, told, dim);
  } else {
    text =
        "give each leaf one row for each sample, parts of other lengths padded to one, "
        "torch.nn.utils.rnn.pad_sequence(parts, batch_first=True); or " +
        shared;
  }
  if (const int64_t second = second_size(batch); second >= 0) {
    text += "; for a batch of " + std::to_string(second) +
            " samples along dimension 1 of all (time first), say batch_dim=1";
  }
  return text;
}

template <typename Change>
Batch with_tensors(const Batch& batch, Change change) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = change(leaf);
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace

int64_t batch_size(const Batch& batch, std::string_view name) {
  int64_t size = -1;
  size_t first = 0;
  for (size_t i = 0; i < batch.leaves().size(); ++i) {
    const Leaf& leaf = batch.leaves()[i];
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    const int64_t here = leaf_size(batch, i, name);
    if (size < 0) {
      size = here;
      first = i;
    } else if (here != size) {
      throw BatchError(
          describe(name, batch, i) + " has " + std::to_string(here) + " samples, " +
          describe(name, batch, first) + " has " + std::to_string(size) +
          "; every leaf needs the same number: " + advice(batch, name, first, size, i, here));
    }
  }
  if (size < 0) {
    throw BatchError(std::string(name) +
                     " has no tensor with a batch dimension, so there is nothing to split; pass a "
                     "tensor or an array of numbers whose first dimension is the batch: "
                     "torch.tensor(rows), torch.stack(rows)");
  }
  if (size == 0) throw BatchError(describe(name, batch, first) + " is empty: it has 0 samples");
  return size;
}

Batch rows(const Batch& batch, int64_t begin, int64_t end) {
  return with_tensors(batch, [&](const Leaf& leaf) {
    return leaf.batch_dim == Leaf::kShared ? leaf.tensor : rows_of(leaf.tensor, leaf, {begin, end});
  });
}

at::Tensor in_order(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& order) {
  return tensor.index_select(dim, at::tensor(order, at::kLong).to(tensor.device()));
}

Batch in_order(const Batch& batch, const std::vector<int64_t>& order) {
  return with_tensors(batch, [&](const Leaf& leaf) {
    if (leaf.batch_dim == Leaf::kShared) return leaf.tensor;
    return change_samples(leaf.tensor, leaf, [&](const at::Tensor& apart, int64_t dim) {
      return in_order(apart, dim, order);
    });
  });
}

Batch every(const Batch& batch, int64_t step) {
  return with_tensors(batch, [&](const Leaf& leaf) {
    if (leaf.batch_dim == Leaf::kShared) return leaf.tensor;
    return change_samples(leaf.tensor, leaf, [&](const at::Tensor& apart, int64_t dim) {
      return apart.slice(dim, 0, apart.size(dim), step);
    });
  });
}

at::Tensor with_samples_apart(const at::Tensor& tensor, const Leaf& like) {
  if (like.places == 1) return tensor;
  const int64_t samples = tensor.size(like.batch_dim) / like.places;
  return like.interleaved ? tensor.unflatten(like.batch_dim, {like.places, samples})
                          : tensor.unflatten(like.batch_dim, {samples, like.places});
}

at::Tensor rows_of(const at::Tensor& tensor, const Leaf& like, Rows part) {
  return change_samples(tensor, like, [&](const at::Tensor& apart, int64_t dim) {
    // What narrow does, without an op around an op; slice alone would cut off what is too long.
    if (part.begin < 0 || part.end > apart.size(dim)) {
      throw BatchError("rows " + std::to_string(part.begin) + " to " + std::to_string(part.end) +
                       " are asked for of " + std::to_string(apart.size(dim)));
    }
    return apart.slice(dim, part.begin, part.end);
  });
}

Batch to_device(const Batch& batch, at::Device device) {
  if (device.is_cpu()) return batch;
  return with_tensors(batch, [&](const Leaf& leaf) {
    if (!leaf.tensor.device().is_cpu()) return leaf.tensor;
    // Only pinned memory can be copied while the host goes on.
    const bool pinned = leaf.tensor.is_pinned();
    at::Tensor moved = leaf.tensor.to(device, /*non_blocking=*/pinned);
    if (pinned) PinnedCopies::started(device);
    return moved;
  });
}

Batch detached(const Batch& batch) {
  return with_tensors(batch, [](const Leaf& leaf) {
    const at::Tensor alone = leaf.tensor.detach();
    if (!is_plain(alone)) return alone;
    return alone.storage().nbytes() > alone.nbytes() ? alone.clone() : alone;
  });
}

std::vector<int64_t> following_dims(const std::vector<Batch>& parts,
                                    const std::vector<int64_t>& row_counts, size_t leaf) {
  const int64_t count = parts.front().leaves()[leaf].tensor.dim();
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < count; ++dim) {
    bool follows = true;
    for (size_t i = 0; i < parts.size() && follows; ++i) {
      const at::Tensor& part = parts[i].leaves()[leaf].tensor;
      follows = part.dim() == count && part.size(dim) == row_counts[i];
    }
    if (follows) dims.push_back(dim);
  }
  return dims;
}

namespace {

/// The one dimension along which every part has its number of rows; of a single part `kShared`
/// where there is none.
int64_t follows_rows(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                     size_t leaf, const std::string& name) {
  const std::vector<int64_t> dims = following_dims(parts, row_counts, leaf);
  // With all parts of one size a second dimension may match by chance: the first is the convention.
  if (!dims.empty()) return dims.front();
  if (parts.size() == 1) return Leaf::kShared;
  refuse_squeezed(parts, row_counts, name.substr(0, name.find_first_of("[.")));
  throw BatchError(name + " has shape " + shape(parts.front().leaves()[leaf].tensor) + " for " +
                   std::to_string(row_counts.front()) +
                   " rows: no dimension follows the micro-batch, so the parts cannot be joined; "
                   "return one value for each sample (a mean over samples is then for the loss to "
                   "take), or (where keep_outputs asks for it) use on_micro_batch instead");
}

}  // namespace

Batch concatenate(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                  std::string_view name) {
  Batch joined = std::move(parts.front());
  for (size_t leaf = 0; leaf < joined.leaves().size(); ++leaf) {
    if (!joined.leaves()[leaf].tensor.defined()) continue;
    parts.front() = joined;
    const std::string leaf_name = describe(name, joined, leaf);
    const int64_t dim = follows_rows(parts, row_counts, leaf, leaf_name);
    std::vector<at::Tensor> tensors;
    // One leaf's parts are let go of before the next one is joined.
    for (Batch& part : parts) {
      tensors.push_back(std::exchange(part.leaves()[leaf].tensor, at::Tensor()));
    }
    Leaf& made = joined.leaves()[leaf];
    made.batch_dim = dim;
    if (tensors.size() > 1) made.tensor = join_rows(tensors, made, leaf_name);
  }
  return joined;
}

Dims dims_of(const Batch& batch) {
  Dims dims;
  for (const Leaf& leaf : batch.leaves()) {
    if (!leaf.tensor.defined()) continue;
    std::vector<int64_t>& sizes = dims.emplace_back(leaf.tensor.sizes().vec());
    if (leaf.batch_dim >= 0 && leaf.batch_dim < leaf.tensor.dim()) {
      if (leaf.places > 1) {
        sizes[static_cast<size_t>(leaf.batch_dim)] = leaf.places;
      } else {
        sizes.erase(sizes.begin() + leaf.batch_dim);
      }
    }
  }
  return dims;
}

namespace {

struct KeptRows {
  Batch batch;
  std::string why_none;
  Batch operator()(int64_t begin, int64_t end) const {
    if (!why_none.empty()) throw BatchError(why_none);
    return infinitybatch::rows(batch, begin, end);
  }
};

void check_readable(const Batch& batch, std::string_view name) {
  for (size_t i = 0; i < batch.leaves().size(); ++i) {
    const Leaf& leaf = batch.leaves()[i];
    if (!leaf.tensor.defined()) continue;
    refuse_tangent(describe(name, batch, i), leaf.tensor);
    if (leaf.tensor.is_meta()) {
      throw Unsupported(describe(name, batch, i) +
                        " is on the meta device and has no values; make it on the model's device");
    }
  }
}

std::string signature_of(const Batch& batch) {
  std::string signature;
  for (const Leaf& leaf : batch.leaves()) {
    if (!leaf.tensor.defined()) continue;
    signature += c10::toString(leaf.tensor.scalar_type());
    signature += leaf.tensor.device().str();
    signature += '/' + std::to_string(leaf.batch_dim) + '/' + std::to_string(leaf.tensor.dim());
    if (leaf.places > 1) signature += leaf.interleaved ? "/interleaved" : "/together";
    signature += ';';
  }
  return signature;
}

bool has_rows(const Leaf& leaf, int64_t samples) {
  return leaf.batch_dim != Leaf::kShared && leaf.batch_dim < leaf.tensor.dim() &&
         leaf.tensor.size(leaf.batch_dim) == samples * leaf.places;
}

}  // namespace

bool keeps_rows(const BatchSource& source) {
  return source.rows.target<KeptRows>() != nullptr;
}

const Batch* kept_batch(const BatchSource& source) {
  const auto* kept = source.rows.target<KeptRows>();
  return kept == nullptr ? nullptr : &kept->batch;
}

std::string why_no_rows(const BatchSource& source) {
  const auto* kept = source.rows.target<KeptRows>();
  return kept == nullptr ? std::string() : kept->why_none;
}

BatchSource BatchSource::from(const Batch& batch, std::string_view name) {
  check_readable(batch, name);
  return {batch_size(batch, name), KeptRows{batch, {}},
          signature_of(batch),     dims_of(batch),
          /*uniform=*/true,        identity_of_plain_leaves(batch) + layouts_of(batch)};
}

BatchSource targets_as_given(const Batch& targets) {
  try {
    return BatchSource::from(targets, "targets");
  } catch (const BatchError& error) {
    return {0, KeptRows{targets, error.what()}};
  }
}

BatchSource whole_targets(const BatchSource& targets, int64_t samples) {
  const Batch* given = kept_batch(targets);
  if (given == nullptr || targets.size == samples) return targets;
  Batch whole = *given;
  Batch in_rows = *given;
  for (size_t i = 0; i < whole.leaves().size(); ++i) {
    Leaf& leaf = whole.leaves()[i];
    if (!leaf.tensor.defined() || has_rows(leaf, samples)) continue;
    leaf.batch_dim = Leaf::kShared;
    leaf.places = 1;
    in_rows.leaves()[i].tensor = at::Tensor();
  }
  return {samples, KeptRows{std::move(whole), {}}, "whole;" + signature_of(in_rows),
          dims_of(in_rows), /*uniform=*/true};
}

}  // namespace infinitybatch
