#include "execute/output_law.hpp"

#include "core/bits.hpp"
#include "core/following_dims.hpp"
#include "core/join.hpp"
#include "core/plain_leaves.hpp"
#include "core/squeezed.hpp"
#include "execute/rows_seen.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

namespace infinitybatch {
namespace {

std::string name_of(const Batch& outputs, size_t leaf) {
  return "outputs" + outputs.structure()->leaf_name(leaf);
}

std::string shape_for(const at::Tensor& tensor, int64_t rows) {
  return " has shape " + c10::str(tensor.sizes()) + " for " + std::to_string(rows) + " rows";
}

constexpr const char* kStack =
    ", and one tensor, as in torch.stack(outputs), in place of a list with a tensor for each "
    "sample";

[[noreturn]] void refuse(const OutputForm& form, size_t leaf, const std::string& why) {
  throw BatchError(
      name_of(form.outputs, leaf) + shape_for(form.outputs.leaves()[leaf].tensor, form.rows) +
      ": no dimension follows the micro-batch, so the parts cannot be joined, and " + why +
      "; return one value for each sample (a list with a tensor for each as torch.stack(outputs); "
      "a mean over samples is then for the loss to take; a model that returns its own loss is for "
      "losses.from_model). What the model itself "
      "needs of the whole batch is a matter for "
      "across_batch");
}

[[noreturn]] void refuse_unknown_order(const OutputForm& form, size_t leaf) {
  refuse(
      form, leaf,
      "its first dimension has several rows for each sample, whose order nobody can tell from "
      "their values; return it before it is flattened, [time, batch, ...], and flatten it in the "
      "loss");
}

/// Follows the samples along none of its dimensions: the same for any of them, or an error.
void check_once(const OutputForm& form, const OutputForm& other, size_t leaf) {
  const at::Tensor& here = form.outputs.leaves()[leaf].tensor;
  const at::Tensor& there = other.outputs.leaves()[leaf].tensor;
  if (form.from_samples[leaf] || other.from_samples[leaf]) {
    const auto& why = form.why ? form.why : other.why;
    refuse(
        form, leaf,
        why ? "nobody knows whether it is the same for any samples (" + *why + ")"
            : std::string("it comes from the samples, so it is not the same for all of them") +
                  (form.rows == 1 && here.dim() == 0 ? " (" + std::string(kSqueezed) + ")" : ""));
  }
  if (!same_form(here, there) || any_bit_differs(here, there).item<bool>()) {
    refuse(form, leaf,
           "it is not the same for " + std::to_string(other.rows) +
               " rows, be it that it depends on their number or on random numbers");
  }
}

}  // namespace

bool OutputLaw::fits(const Batch& outputs) const {
  if (leaves.empty() || leaves.size() != outputs.leaves().size()) return false;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    if (leaves[i].dims != (tensor.defined() ? tensor.dim() : -1)) return false;
  }
  return true;
}

bool needs_other_rows(const OutputForm& form) {
  if (has_plain_numbers(form.outputs)) return true;
  for (size_t i = 0; i < form.outputs.leaves().size(); ++i) {
    if (!form.outputs.leaves()[i].tensor.defined()) continue;
    if (!form.from_samples[i]) return true;
    if (following_dims({form.outputs}, {form.rows}, i).size() > 1) return true;
  }
  return false;
}

bool may_be_flattened(const OutputForm& form) {
  for (size_t i = 0; i < form.outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = form.outputs.leaves()[i].tensor;
    if (!tensor.defined() || tensor.dim() == 0 || !form.from_samples[i]) continue;
    const std::vector<int64_t> dims = following_dims({form.outputs}, {form.rows}, i);
    const bool first = !dims.empty() && dims.front() == 0;
    if (!first && tensor.size(0) > form.rows && tensor.size(0) % form.rows == 0) return true;
  }
  return false;
}

OutputLaw find_output_law(const OutputForm& form, const OutputForm* other) {
  const size_t count = form.outputs.leaves().size();
  if (other != nullptr && other->outputs.leaves().size() != count) {
    throw BatchError("the model returned " + std::to_string(count) + " values for " +
                     std::to_string(form.rows) + " rows and " +
                     std::to_string(other->outputs.leaves().size()) + " for " +
                     std::to_string(other->rows) +
                     ", so the outputs of micro-batches cannot be joined; return the same ones for "
                     "every batch" +
                     kStack);
  }
  if (other != nullptr) {
    check_plain_leaves({form.outputs, other->outputs}, {form.rows, other->rows},
                       /*other_sizes=*/true);
  }
  OutputLaw law;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = form.outputs.leaves()[i].tensor;
    OutputLaw::OfLeaf& leaf = law.leaves.emplace_back();
    if (!tensor.defined()) continue;
    leaf.dims = tensor.dim();
    const Flattened flattened = i < form.flattened.size() ? form.flattened[i] : Flattened::no;
    if (flattened != Flattened::no) {
      if (flattened == Flattened::unknown) refuse_unknown_order(form, i);
      leaf.batch_dim = 0;
      leaf.flattened = flattened;
      continue;
    }
    const bool both = other != nullptr && other->outputs.leaves()[i].tensor.defined();
    const std::vector<int64_t> dims =
        both ? following_dims({form.outputs, other->outputs}, {form.rows, other->rows}, i)
             : following_dims({form.outputs}, {form.rows}, i);
    if (!dims.empty()) {
      leaf.batch_dim = dims.front();
      leaf.compares = both && dims.size() > 1;
    } else if (both) {
      check_once(form, *other, i);
    } else {
      check_once(form, form, i);
    }
  }
  return law;
}

BatchError compared(const Batch& outputs, size_t leaf) {
  return BatchError(name_of(outputs, leaf) +
                    " has several dimensions that follow the micro-batch (its shape is " +
                    c10::str(outputs.leaves()[leaf].tensor.sizes()) +
                    "), as where its samples are compared with each other: a comparison of samples "
                    "of different micro-batches is not among them. Return what is compared, and "
                    "let the loss compare: losses.coupled(lambda z, t: loss(z @ z.T, t))");
}

void explain_compared(const Batch& outputs, const Batch& targets, int64_t rows, int64_t total) {
  const auto& leaves = targets.leaves();
  const bool all = std::any_of(leaves.begin(), leaves.end(), [&](const Leaf& leaf) {
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) return false;
    const auto sizes = leaf.tensor.sizes();
    return std::find(sizes.begin(), sizes.end(), total) != sizes.end();
  });
  if (!all) return;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const bool square =
        outputs.leaves()[i].tensor.defined() && following_dims({outputs}, {rows}, i).size() > 1;
    if (square) std::throw_with_nested(compared(outputs, i));
  }
}

void refuse_compared(const Batch& outputs, size_t leaf) {
  throw compared(outputs, leaf);
}

void check_same(const at::Tensor& first, const at::Tensor& part, const std::string& name) {
  if (same_form(first, part) && !any_bit_differs(first, part).item<bool>()) return;
  throw BatchError(name + " of shape " + c10::str(first.sizes()) +
                   " does not come from the samples, so that the whole batch would have it once, "
                   "but micro-batches give different values for it: it depends on their number or "
                   "on random numbers; return one value for each sample");
}

Batch join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts, const OutputLaw& law,
           const std::vector<at::Tensor>& expected) {
  std::vector<std::pair<size_t, Leaf>> apart;
  for (const Batch& part : parts) {
    if (law.fits(part)) continue;
    refuse_squeezed(parts, row_counts, "outputs");
    throw BatchError(
        "outputs of different micro-batches have different structures, so they cannot be joined; "
        "return the same ones for every batch" +
        std::string(kStack));
  }
  for (size_t i = 0; i < law.leaves.size(); ++i) {
    Leaf leaf = parts.front().leaves()[i];
    if (!leaf.tensor.defined()) continue;
    leaf.batch_dim = law.leaves[i].batch_dim;
    std::vector<at::Tensor> tensors;
    for (const Batch& part : parts) tensors.push_back(part.leaves()[i].tensor);
    if (law.leaves[i].once()) {
      if (i < expected.size() && expected[i].defined()) tensors.push_back(expected[i]);
      for (const at::Tensor& each : tensors) {
        check_same(leaf.tensor, each, name_of(parts.front(), i));
      }
    } else if (law.leaves[i].flattened != Flattened::no) {
      const std::string name = name_of(parts.front(), i);
      leaf.interleaved = law.leaves[i].flattened == Flattened::interleaved;
      leaf.places = places_of(tensors, row_counts, name);
      leaf.tensor = join_rows(tensors, leaf, name);
    } else {
      const std::vector<int64_t> dims = following_dims(parts, row_counts, i);
      if (dims.size() > 1 && row_counts.front() != row_counts.back()) {
        refuse_compared(parts.front(), i);
      }
      if (dims.empty() || dims.front() == leaf.batch_dim) continue;
      leaf.tensor = at::cat(tensors, leaf.batch_dim);
    }
    tensors.clear();
    for (Batch& part : parts) part.leaves()[i].tensor.reset();
    apart.emplace_back(i, std::move(leaf));
  }
  Batch whole = concatenate(std::move(parts), row_counts, "outputs");
  for (auto& [i, leaf] : apart) whole.leaves()[i] = std::move(leaf);
  return whole;
}

Batch join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
           const std::vector<int64_t>& known_dims) {
  OutputLaw law;
  bool flattened = false;
  for (size_t i = 0; i < parts.front().leaves().size(); ++i) {
    const at::Tensor& tensor = parts.front().leaves()[i].tensor;
    OutputLaw::OfLeaf& leaf = law.leaves.emplace_back();
    if (!tensor.defined()) continue;
    leaf.dims = tensor.dim();
    const int64_t known = i < known_dims.size() ? known_dims[i] : -1;
    const bool first = known == 0 || known == kInterleaved;
    if (first && tensor.dim() > 0 && tensor.size(0) >= 2 * row_counts.front()) {
      leaf.flattened = known == 0 ? Flattened::together : Flattened::interleaved;
      leaf.batch_dim = 0;
      flattened = true;
      continue;
    }
    const std::vector<int64_t> dims = following_dims(parts, row_counts, i);
    if (dims.empty()) return concatenate(std::move(parts), row_counts, "outputs");  // says why
    leaf.batch_dim = dims.front();
  }
  if (!flattened || parts.size() == 1) return concatenate(std::move(parts), row_counts, "outputs");
  return join(std::move(parts), row_counts, law, {});
}

}  // namespace infinitybatch
