#include "step/mark_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

/// The first key of a path such as "['mask'][1]", "[0]" or ".ids", which is cut off.
std::string first_key(std::string& path) {
  size_t begin = 1;
  size_t end = std::string::npos;
  size_t behind = std::string::npos;
  if (path.starts_with("['")) {
    begin = 2;
    end = path.find("']");
    behind = end == std::string::npos ? end : end + 2;
  } else if (path.starts_with("[")) {
    end = path.find(']');
    behind = end == std::string::npos ? end : end + 1;
  } else if (path.starts_with(".")) {
    end = behind = path.find_first_of(".[", 1);
    if (end == std::string::npos) end = behind = path.size();
  }
  if (end == std::string::npos) return std::exchange(path, {});
  std::string key = path.substr(begin, end - begin);
  path.erase(0, behind);
  return key;
}

/// The argument that a leaf belongs to: its name or position.
std::string argument_of(const Batch& batch, size_t leaf, size_t depth) {
  std::string path = batch.structure()->leaf_name(leaf);
  for (size_t level = 0; level < depth; ++level) first_key(path);
  return path.empty() ? "0" : first_key(path);
}

/// Tensors of one side of a step.
class Marking {
 public:
  Marking(Batch& batch, const BatchDim& given, std::string name, size_t depth)
      : batch_(batch), given_(given), name_(std::move(name)), depth_(depth) {}

  /// Which leaves wait for a mark.
  template <typename Each>
  void for_each_unmarked(const Each& each) const {
    for (size_t i = 0; i < batch_.leaves().size(); ++i) {
      Leaf& leaf = batch_.leaves()[i];
      if (!leaf.tensor.defined() || leaf.marked || leaf.batch_dim != 0) continue;
      each(i, leaf);
    }
  }

  /// The dimension that an argument was given.
  std::optional<int64_t> named(size_t leaf) const {
    const bool targets = name_ == "targets";
    const auto& dims = *given_.by_argument();
    const auto found = dims.find(targets ? "targets" : argument_of(batch_, leaf, depth_));
    return found == dims.end() ? std::nullopt : std::optional(found->second);
  }

  [[noreturn]] void refuse(size_t leaf, int64_t samples, const std::string& why,
                           int64_t other) const {
    const at::Tensor& tensor = batch_.leaves()[leaf].tensor;
    const std::string key = name_ == "targets" ? "targets" : argument_of(batch_, leaf, depth_);
    const bool position =
        std::all_of(key.begin(), key.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    std::ostringstream text;
    text << name_ << batch_.structure()->leaf_name(leaf) << " has shape " << tensor.sizes()
         << " in a batch of " << samples << " with batch_dim=" << *given_.for_all() << ", and "
         << why << ": mark it with ib.batch_dim(x, " << other << ") or ib.shared(x), or name "
         << "each argument that has its samples elsewhere than first, batch_dim={"
         << (position ? key : "'" + key + "'") << ": ...} (a dimension, or None for shared)";
    throw BatchError(text.str());
  }

  /// Where no tensor has the dimension that all were given. Without a tensor that waits for a mark,
  /// others tell what is wrong.
  void refuse_missing(int64_t dim) const {
    const Leaf* most = nullptr;
    std::string path;
    for_each_unmarked([&](size_t i, const Leaf& leaf) {
      if (leaf.tensor.dim() == 0 || (most && leaf.tensor.dim() <= most->tensor.dim())) return;
      most = &leaf;
      path = batch_.structure()->leaf_name(i);
    });
    if (!most) return;
    std::ostringstream text;
    text << "batch_dim is " << dim << ", but no tensor in " << name_ << " has a dimension " << dim
         << ": " << name_ << path << " has shape " << most->tensor.sizes()
         << (most->tensor.dim() > 1 ? ", dimensions 0 to " + std::to_string(most->tensor.dim() - 1)
                                    : std::string(", dimension 0 alone"))
         << "; give the dimension along which its samples lie, or mark it with ib.batch_dim(x, 0)";
    throw BatchError(text.str());
  }

 private:
  Batch& batch_;
  const BatchDim& given_;
  const std::string name_;
  const size_t depth_;
};

int64_t places_before(const at::Tensor& tensor, int64_t dim) {
  return c10::multiply_integers(tensor.sizes().slice(0, static_cast<size_t>(dim)));
}

bool has(const at::Tensor& tensor, int64_t dim, int64_t size) {
  return dim < tensor.dim() && tensor.size(dim) == size;
}

/// A dimension of that size other than `dim`; -1 without one.
int64_t elsewhere(const at::Tensor& tensor, int64_t dim, int64_t size) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d != dim && tensor.size(d) == size) return d;
  }
  return -1;
}

/// As a mask of [time, time] where there are as many steps of time as samples; whole numbers are
/// no mask.
bool may_be_mask(const at::Tensor& tensor, int64_t size) {
  const bool number = !tensor.is_floating_point() && tensor.scalar_type() != at::kBool;
  return tensor.dim() == 2 && !number && tensor.size(0) == size && tensor.size(1) == size;
}

/// How many places each sample has in [time, batch] that was flattened; 1: it was not.
int64_t places_in(const at::Tensor& tensor, int64_t samples) {
  if (tensor.dim() == 0 || samples < 1 || tensor.size(0) % samples != 0) return 1;
  return std::max<int64_t>(1, tensor.size(0) / samples);
}

void mark_flattened(Leaf& leaf, int64_t places) {
  leaf.places = places;
  leaf.interleaved = true;
}

void mark(Leaf& leaf, int64_t dim) {
  leaf.batch_dim = dim;
  leaf.marked = true;
}

}  // namespace

std::vector<std::string> path_of(const Batch& batch, size_t leaf) {
  std::string rest = batch.structure()->leaf_name(leaf);
  std::vector<std::string> keys;
  while (!rest.empty()) keys.push_back(first_key(rest));
  if (keys.empty()) keys.emplace_back("0");
  return keys;
}

BatchDim::BatchDim(std::variant<int64_t, ByArgument> dims) : dims_(std::move(dims)) {
  const auto check = [](int64_t dim, int64_t least) {
    if (dim >= least) return;
    throw InvalidArgument("batch_dim is " + std::to_string(dim) +
                          "; count dimensions from the front, starting at 0");
  };
  if (const int64_t* dim = for_all()) {
    check(*dim, 0);
  } else {
    for (const auto& [argument, dim] : *by_argument()) check(dim, Leaf::kShared);
  }
}

Extent extent_of(const Batch& inputs) {
  for (const Leaf& leaf : inputs.leaves()) {
    if (!leaf.tensor.defined() || leaf.batch_dim < 0 || leaf.batch_dim >= leaf.tensor.dim()) {
      continue;
    }
    return {leaf.tensor.size(leaf.batch_dim), places_before(leaf.tensor, leaf.batch_dim)};
  }
  return {};
}

Batch mark_inputs(Batch inputs, const BatchDim& given, size_t depth) {
  const Marking marking(inputs, given, "inputs", depth);
  if (given.by_argument() != nullptr) {
    marking.for_each_unmarked([&](size_t i, Leaf& leaf) {
      if (const auto dim = marking.named(i)) mark(leaf, *dim);
    });
    return inputs;
  }
  const int64_t dim = *given.for_all();
  Extent extent;
  size_t first = inputs.leaves().size();
  for (size_t i = 0; i < inputs.leaves().size() && first == inputs.leaves().size(); ++i) {
    const Leaf& leaf = inputs.leaves()[i];
    const int64_t along = leaf.marked ? leaf.batch_dim : dim;
    if (!leaf.tensor.defined() || along < 0 || along >= leaf.tensor.dim()) continue;
    extent = {leaf.tensor.size(along), places_before(leaf.tensor, along)};
    first = i;
  }
  if (first == inputs.leaves().size()) {
    marking.refuse_missing(dim);
    return inputs;
  }
  const int64_t samples = extent.samples;
  marking.for_each_unmarked([&](size_t i, Leaf& leaf) {
    const at::Tensor& tensor = leaf.tensor;
    if (tensor.dim() == 0) return;
    if (has(tensor, dim, samples)) {
      if (i != first && samples > 1 && may_be_mask(tensor, samples)) {
        marking.refuse(i, samples, "may be split, or the same for all samples", dim);
      }
      return mark(leaf, dim);
    }
    if (tensor.dim() == 1 && tensor.size(0) == samples) return mark(leaf, 0);
    const int64_t other = elsewhere(tensor, dim, samples);
    if (samples > 1 && other >= 0) {
      marking.refuse(i, samples, "has that size along another dimension", other);
    }
    if (samples > 1 && extent.places > 1 && places_in(tensor, samples) == extent.places) {
      marking.refuse(i, samples,
                     "may be [time, batch] flattened, which a model is not given rows of", dim);
    }
    mark(leaf, Leaf::kShared);
  });
  return inputs;
}

Batch mark_targets(Batch targets, const BatchDim& given, const Extent& inputs, bool whole) {
  const Marking marking(targets, given, "targets", 0);
  const int64_t samples = inputs.samples;
  if (given.by_argument() != nullptr) {
    marking.for_each_unmarked([&](size_t i, Leaf& leaf) {
      const std::optional<int64_t> dim = marking.named(i);
      if (!dim) return;
      const int64_t places = places_in(leaf.tensor, samples);
      if (*dim > 0 && !has(leaf.tensor, *dim, samples) && places > 1) {
        mark_flattened(leaf, places);
        return mark(leaf, 0);
      }
      mark(leaf, *dim);
    });
    return targets;
  }
  const int64_t dim = *given.for_all();
  marking.for_each_unmarked([&](size_t i, Leaf& leaf) {
    const at::Tensor& tensor = leaf.tensor;
    const int64_t places = places_in(tensor, samples);
    if (has(tensor, dim, samples)) {
      if (dim > 0 && places > 1 && places == inputs.places && !whole) {
        marking.refuse(i, samples, "may be [time, batch] flattened, too", dim);
      }
      return mark(leaf, dim);
    }
    if (tensor.dim() == 1 && tensor.size(0) == samples) return mark(leaf, 0);
    const int64_t other = elsewhere(tensor, dim, samples);
    if (samples > 1 && other >= 0) {
      if (whole) return mark(leaf, Leaf::kShared);
      marking.refuse(i, samples, "has that size along another dimension", other);
    }
    if (dim > 0 && places > 1) {
      mark_flattened(leaf, places);
      return mark(leaf, 0);
    }
    if (dim < tensor.dim()) mark(leaf, dim);  // sizes differ, which is told of
  });
  return targets;
}

Batch mark_rows(Batch rows, const BatchDim& given, std::string_view name) {
  const Marking marking(rows, given, std::string(name), 0);
  if (given.by_argument() != nullptr) {
    marking.for_each_unmarked([&](size_t i, Leaf& leaf) {
      if (const auto dim = marking.named(i)) mark(leaf, *dim);
    });
    return rows;
  }
  const int64_t dim = *given.for_all();
  bool any = false;
  for (const Leaf& leaf : rows.leaves()) {
    any = any || (leaf.tensor.defined() && (leaf.marked || leaf.tensor.dim() > dim));
  }
  // Labels may have one dimension whatever inputs have.
  if (!any && name == "inputs") marking.refuse_missing(dim);
  marking.for_each_unmarked([&](size_t, Leaf& leaf) {
    if (leaf.tensor.dim() > dim) mark(leaf, dim);
  });
  return rows;
}

}  // namespace infinitybatch
