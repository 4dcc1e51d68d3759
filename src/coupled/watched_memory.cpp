#include "coupled/watched_memory.hpp"

#include "core/extent.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"
#include "coupled/plain_copy.hpp"
#include "tape/op_bus.hpp"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <string_view>
#include <utility>

namespace infinitybatch::coupled {
namespace {

/// They take a tensor for its form.
bool asks_for_form(std::string_view op) {
  return op.ends_with("_like") || op.starts_with("aten::new_") || op.starts_with("aten::_has_");
}

/// They write every element of their first argument without reading one.
bool overwrites(std::string_view op) {
  constexpr std::array<std::string_view, 7> kOps{
      "aten::zero_",    "aten::fill_",      "aten::copy_",  "aten::normal_",
      "aten::uniform_", "aten::bernoulli_", "aten::random_"};
  return std::find(kOps.begin(), kOps.end(), op) != kOps.end();
}

/// Strides with sizes, the smallest stride first: transposing changes nothing.
std::vector<std::pair<int64_t, int64_t>> steps_of(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    steps.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// Of two tensors in one storage: whether they are slices of one tensor that have no place in
/// common (rows of a batch, or columns where the batch lies there).
bool are_other_slices(const at::Tensor& first, const at::Tensor& second) {
  if (first.storage_offset() > second.storage_offset()) return are_other_slices(second, first);
  const int64_t apart = second.storage_offset() - first.storage_offset();
  const auto steps = steps_of(first);
  const auto others = steps_of(second);
  if (steps.size() != others.size()) return false;
  int64_t inside = 0;  // what dimensions with smaller strides reach over
  bool found = false;
  for (size_t dim = 0; dim < steps.size(); ++dim) {
    const auto [stride, size] = steps[dim];
    if (others[dim].first != stride) return false;
    const int64_t outer =
        dim + 1 < steps.size() ? steps[dim + 1].first : std::numeric_limits<int64_t>::max();
    found = found || (stride > inside && apart % stride == 0 && apart / stride >= size &&
                      apart + others[dim].second * stride <= outer);
    inside += (std::max(size, others[dim].second) - 1) * stride;
  }
  return found;
}

/// Whether two tensors in one storage may have elements in common.
bool may_overlap(const at::Tensor& first, const at::Tensor& second) {
  if (!is_plain(first) || !is_plain(second)) return true;
  if (first.numel() == 0 || second.numel() == 0) return false;
  if (first.dtype() != second.dtype()) return true;
  const auto [begin, end] = extent_of(first);
  const auto [other_begin, other_end] = extent_of(second);
  if (end <= other_begin || other_end <= begin) return false;
  return !are_other_slices(first, second);
}

}  // namespace

void WatchedMemory::know(const at::Tensor& tensor, bool carried) {
  if (!tensor.defined()) return;
  const TensorStorages storages = storages_of(tensor);
  if (find(tensor)) {
    any_carried_ = any_carried_ || carried;
    return;
  }
  // An alias of a parameter (`weight` of a fresh spectral_norm) carries what the parameter does.
  const auto is_of_others = [this](size_t place) { return !known_[place].carried; };
  for (const c10::StorageImpl* storage : storages) {
    const auto here = at_.find(storage);
    if (carried && here != at_.end() &&
        std::any_of(here->second.begin(), here->second.end(), is_of_others)) {
      return;
    }
  }
  any_carried_ = any_carried_ || carried;
  for (const c10::StorageImpl* storage : storages) at_[storage].push_back(known_.size());
  Known added;
  added.tensor = tensor;
  added.memory = tensor.variable_data();
  added.carried = carried;
  known_.push_back(std::move(added));
}

void WatchedMemory::leave_rescaled(const at::Tensor& tensor) {
  const auto found = at_.find(storage_of(tensor));
  if (found == at_.end()) return;
  for (const size_t place : found->second) known_[place].rescaled = true;
}

void WatchedMemory::forget_carried() {
  if (!any_carried_) return;
  std::vector<Known> others;
  for (Known& each : known_) {
    // What was written into is to be undone.
    if (!each.carried || each.before.defined()) others.push_back(std::move(each));
  }
  known_.clear();
  at_.clear();
  any_carried_ = false;
  for (Known& each : others) {
    for (const c10::StorageImpl* storage : storages_of(each.memory)) {
      at_[storage].push_back(known_.size());
    }
    known_.push_back(std::move(each));
  }
}

void WatchedMemory::observe(const tape::SeenOp& op) {
  const tape::OpFacts* facts = op.facts();
  if (!minds(facts)) return;
  const std::string& name = facts->name();
  if (facts->writes_metadata || asks_for_form(name)) return;
  const bool views = std::find(facts->viewed.begin(), facts->viewed.end(), true) !=
                     facts->viewed.end();  // whoever takes the view is seen
  const auto inputs = op.inputs();
  const size_t count = std::min(inputs.size(), facts->written.size());
  for (size_t i = 0; i < count; ++i) {
    const bool covers = i == 0 && overwrites(name);
    const bool writes = facts->written[i];
    const bool reads = any_carried_ && !covers && !views;
    if (writes || reads) on_value(inputs[i], writes, reads, covers);
  }
}

void WatchedMemory::on_value(const c10::IValue& value, bool writes, bool reads, bool covers) {
  if (value.isTensor()) {
    on_tensor(value.toTensor(), writes, reads, covers);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& each : value.toListRef()) on_value(each, writes, reads, covers);
  }
}

void WatchedMemory::on_tensor(const at::Tensor& tensor, bool writes, bool reads, bool covers) {
  Places places;
  for (const c10::StorageImpl* storage : storages_of(tensor)) {
    const auto found = at_.find(storage);
    if (found != at_.end()) places.append(found->second.begin(), found->second.end());
  }
  if (places.empty() && tensor.defined() && !has_one_storage(tensor)) {
    if (const std::optional<size_t> place = find(tensor)) places.push_back(*place);
  }
  std::exception_ptr failed;  // what is written is put back nevertheless
  for (const size_t i : places) {
    Known& known = known_[i];
    // A micro-batch that a module remembers lies beside the next one.
    if (known.carried && !may_overlap(known.memory, tensor)) continue;
    if (reads && known.carried && !known.renewed) known.read = true;
    if (!writes) continue;
    known.written = true;
    known.renewed = known.renewed || (covers && tensor.numel() == known.tensor.numel());
    if (known.before.defined()) continue;
    try {
      copy_before_write(known.memory, known.before);
    } catch (...) {
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
}

void WatchedMemory::rest() {
  for (Known& each : known_) each.written = each.read = each.renewed = false;
}

std::optional<size_t> WatchedMemory::find(const at::Tensor& tensor) const {
  for (const c10::StorageImpl* storage : storages_of(tensor)) {
    const auto found = at_.find(storage);
    if (found == at_.end()) continue;
    for (const size_t place : found->second) {
      if (known_[place].tensor.is_same(tensor)) return place;
    }
  }
  if (!tensor.defined() || has_one_storage(tensor)) return std::nullopt;
  // An operator that wrote into it has given it other parts.
  for (size_t place = 0; place < known_.size(); ++place) {
    if (known_[place].tensor.is_same(tensor)) return place;
  }
  return std::nullopt;
}

void WatchedMemory::undo() const {
  const at::NoGradGuard no_grad;
  for (const Known& each : known_) {
    if (each.before.defined()) put_back(each.memory, each.tensor, each.before);
  }
}

}  // namespace infinitybatch::coupled
