#include "execute/carried_state.hpp"

#include "core/bits.hpp"
#include "core/tensor_memory.hpp"
#include "core/tensor_parts.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

/// Constants may be converted, or made anew with the values that they had.
bool same_values(const at::Tensor& before, const at::Tensor& now) {
  const at::NoGradGuard no_grad;
  if (!is_plain(before) || !is_plain(now)) {
    return same_form(before, now) && !any_bit_differs(before, now).item<bool>();
  }
  if (before.sizes() != now.sizes()) return false;
  return at::equal(before.detach().to(now.device(), now.scalar_type()), now.detach());
}

}  // namespace

CarriedState::Scope::Scope(CarriedState* state, Rows rows, int64_t batch) noexcept
    : within_(state) {
  if (state == nullptr) return;
  state->part_ = rows.size() < batch;
  state->rows_ = rows;
  state->batch_ = batch;
}

CarriedState* CarriedState::at_work() noexcept {
  return ThreadContext::get().carried_state;
}

void CarriedState::before_forward(const PlainLook& look) {
  look_ = look;
  std::vector<NamedParameter> tensors;
  if (first_) {
    tensors = runs_->begin(look);
    if (beside_ != nullptr) {
      beside_->show_first_numbers();
    } else if (PlainNumbers* known = PlainNumbers::at_work()) {
      known->begin();
    }
  } else if (!idle_) {
    runs_->before_part();
    if (part_) tensors = look.tensors();
  }
  before_.clear();
  with_graph_.clear();
  if (!part_) {
    // Nothing is carried, but what is written into is put back where the step fails.
    for (const NamedParameter& each : tensors) memory_.know(each.tensor, /*carried=*/false);
    return;
  }
  if (idle_) return;
  memory_.rest();
  for (NamedParameter& each : tensors) {
    if (first_) found_there_.insert(each.tensor.unsafeGetTensorImpl());
    if (is_left(each.tensor)) continue;
    memory_.know(each.tensor, /*carried=*/true);
    const uint32_t version = version_of(each.tensor);
    before_.push_back({std::move(each.name), std::move(each.tensor), version});
  }
}

void CarriedState::leave(const std::vector<at::Tensor>& buffers) {
  for (const at::Tensor& buffer : buffers) {
    if (const c10::StorageImpl* storage = storage_of(buffer)) of_buffers_.insert(storage);
  }
}

bool CarriedState::is_left(const at::Tensor& tensor) const {
  return of_buffers_.contains(storage_of(tensor));
}

bool CarriedState::has_read(const at::Tensor& tensor) const {
  const std::optional<size_t> place = memory_.find(tensor);
  return place && memory_[*place].carried && memory_[*place].read;
}

void CarriedState::refuse(const std::string& name, const std::string& more) {
  found_ = true;
  throw CouplingError(
      name, "forward reads '" + name +
                "', a tensor in a plain attribute of a module, and leaves another value in it for "
                "the next call" +
                more +
                ": micro-batches would see each other's, so one pass over the whole batch cannot "
                "be reproduced; register it as a buffer if it does not depend on the samples, hand "
                "it in and out as an input and an output (or clear it in forward) if it does, make "
                "the budget large enough for one micro-batch, or allow it with "
                "batch_coupling=\"per_micro_batch\", which lets each micro-batch be a batch of "
                "its own");
}

void CarriedState::after_forward() {
  const bool changed = runs_->forward_is_over();
  if (!part_) {
    if (changed && runs_->finds_parts()) runs_->after_part(rows_, part_);
    first_ = false;
    idle_ = true;
    with_graph_.clear();
    if (collects_ && changed) collect(look_.tensors());
    return;
  }
  runs_->after_part(rows_, part_);
  if (!idle_) return part_is_over();
  if (!changed) return;
  // The first part that leaves anything changed.
  idle_ = false;
  std::vector<NamedParameter> left = look_.tensors();
  std::erase_if(left, [this](const NamedParameter& each) {
    return found_there_.contains(each.tensor.unsafeGetTensorImpl());
  });
  note_left(left);
}

void CarriedState::note_left(const std::vector<NamedParameter>& left) {
  left_.clear();
  for (const NamedParameter& each : left) left_.insert(each.tensor.unsafeGetTensorImpl());
  left_behind_.add(left);
  with_graph_.clear();
  if (collects_) collect(left);
}

void CarriedState::part_is_over() {
  // There was none, and no attribute or container holds anything else: most models, in each step.
  const bool none = first_ && before_.empty() && runs_->found_all_the_same();
  const std::vector<NamedParameter> now = none ? std::vector<NamedParameter>() : look_.tensors();
  bool changed = now.size() != before_.size();  // those in the memory of buffers count too
  std::vector<NamedParameter> left;
  for (const Seen& seen : before_) {
    const auto here = std::find_if(
        now.begin(), now.end(), [&](const NamedParameter& each) { return each.name == seen.name; });
    const bool same = here != now.end() && here->tensor.is_same(seen.tensor);
    const std::optional<size_t> place = memory_.find(seen.tensor);
    const bool carried = place && memory_[*place].carried;
    const bool written =
        version_of(seen.tensor) != seen.version || (carried && memory_[*place].written);
    if (same && !written) continue;
    changed = true;
    if (same) left.push_back(*here);
    if (!has_read(seen.tensor)) continue;
    const at::Tensor& before =
        memory_[*place].before.defined() ? memory_[*place].before : seen.tensor;
    if (here == now.end() || !same_values(before, here->tensor)) refuse(seen.name, "");
  }
  left_.clear();
  for (const NamedParameter& each : now) {
    if (is_left(each.tensor)) continue;
    const bool known = std::any_of(before_.begin(), before_.end(), [&](const Seen& seen) {
      return seen.tensor.is_same(each.tensor);
    });
    if (known) continue;
    left_.insert(each.tensor.unsafeGetTensorImpl());
    left.push_back(each);
  }
  left_behind_.add(left);
  with_graph_.clear();
  if (collects_) collect(left);
  memory_.forget_carried();
  before_.clear();
  if (first_ && !changed && runs_->quiet()) idle_ = true;
  first_ = false;
}

void CarriedState::collect(const std::vector<NamedParameter>& left) {
  for (const NamedParameter& each : left) {
    if (each.tensor.requires_grad() && !each.tensor.is_leaf()) with_graph_.push_back(each.tensor);
  }
}

void CarriedState::forward_failed(const std::string& how) {
  for (const Seen& seen : before_) {
    // Layers may refuse a state before any op has read it, one of an earlier step too.
    const bool of_part = left_.contains(seen.tensor.unsafeGetTensorImpl()) &&
                         (has_read(seen.tensor) || !seen.tensor.requires_grad());
    if (seen.tensor.is_nested()) continue;  // has no sizes
    const auto sizes = seen.tensor.sizes();
    const bool of_whole = std::find(sizes.begin(), sizes.end(), batch_) != sizes.end();
    if (of_part || of_whole) refuse(seen.name, " (which failed: " + how + ")");
  }
}

void CarriedState::roll_back() {
  memory_.forget_carried();
  before_.clear();
  left_.clear();
  left_behind_.clear();
  found_there_.clear();
  runs_->roll_back();
  runs_->forget();
  first_ = true;
  idle_ = false;
}

}  // namespace infinitybatch
