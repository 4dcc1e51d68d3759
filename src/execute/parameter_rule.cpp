#include "execute/parameter_rule.hpp"

#include "core/bits.hpp"
#include "core/tensor_memory.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

namespace infinitybatch {

ParameterRule::ParameterRule(const std::vector<NamedParameter>& parameters,
                             coupled::WatchedMemory& memory, bool exact)
    : memory_(memory), exact_(exact) {
  if (!exact) return;
  entries_.reserve(parameters.size());
  for (const NamedParameter& parameter : parameters) {
    const std::optional<size_t> place = memory.find(parameter.tensor);
    if (!place) continue;  // without a storage
    Entry entry;
    entry.parameter = parameter;
    entry.place = *place;
    entry.version = parameter.tensor._version();
    entries_.push_back(std::move(entry));
  }
}

bool ParameterRule::is_exchanged(const Entry& entry) const {
  const at::Tensor& now = entry.parameter.tensor;
  const at::Tensor& memory = memory_[entry.place].memory;
  if (storages_of(now) != storages_of(memory)) return true;
  return is_plain(now) && now.storage_offset() != memory.storage_offset();
}

void ParameterRule::end_micro_batch() {
  const at::NoGradGuard no_grad;
  if (!sees_) see_micro_batch();
  for (Entry* entry : seen_) restore(*entry);
  seen_.clear();
  memory_.rest();
  sees_ = first_ = false;
}

void ParameterRule::see_micro_batch() {
  const at::NoGradGuard no_grad;
  seen_.clear();
  sees_ = true;
  for (Entry& entry : entries_) {
    const at::Tensor& now = entry.parameter.tensor;
    const coupled::WatchedMemory::Known& known = memory_[entry.place];
    const bool exchanged = is_exchanged(entry);
    const bool seen = known.written;
    const bool counted = now._version() != entry.version && !known.rescaled;
    if (!exchanged && !seen && !counted && !entry.written) continue;
    if (counted && !exchanged && !known.before.defined()) {
      throw Unsupported("forward changes the parameter '" + entry.parameter.name +
                        "' by what is no operator of torch's, so that micro-batches cannot start "
                        "from the values that it had; change it outside of forward");
    }
    seen_.push_back(&entry);
    if (second_pass_) continue;
    if (!entry.written && !first_) entry.left = values_before(entry);
    entry.written = written_ = true;
    entry.exchanged = entry.exchanged || exchanged;
    if (entry.left.defined()) {
      note_difference(entry.left, now.variable_data(), entry.disagree);
    } else {
      entry.left = value_of(now);
    }
  }
}

std::vector<ParameterRule::Found> ParameterRule::found() const {
  std::vector<Found> found;
  for (const Entry& entry : entries_) {
    const coupled::WatchedMemory::Known& known = memory_[entry.place];
    if (entry.left.defined()) found.push_back({entry.parameter.tensor, known.memory, known.before});
  }
  return found;
}

void ParameterRule::end_trial() {
  const bool second_pass = std::exchange(second_pass_, true);
  end_micro_batch();
  second_pass_ = second_pass;
}

at::Tensor ParameterRule::values_before(const Entry& entry) const {
  const coupled::WatchedMemory::Known& known = memory_[entry.place];
  return known.before.defined() ? known.before : value_of(known.memory);
}

void ParameterRule::restore(Entry& entry) {
  at::Tensor& now = entry.parameter.tensor;
  const coupled::WatchedMemory::Known& known = memory_[entry.place];
  if (is_exchanged(entry)) now.set_data(known.memory);
  if (known.before.defined()) put_back(known.memory, known.tensor, known.before);
  entry.version = now._version();
}

void ParameterRule::commit() {
  if (!written_) return;
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) {
    if (!entry.disagree.defined() || !entry.disagree.item<bool>()) continue;
    const std::string& name = entry.parameter.name;
    throw CouplingError(
        name, "forward writes into the parameter '" + name +
                  "' what depends on the samples (as layers do that initialise themselves from "
                  "their first batch): micro-batches leave different values in it, so one pass "
                  "over the whole batch cannot be reproduced; run forward once before the first "
                  "step if it is the first call alone, make the budget large enough for one "
                  "micro-batch, or allow it with batch_coupling=\"per_micro_batch\", which lets "
                  "each micro-batch be a batch of its own");
  }
  for (Entry& entry : entries_) {
    if (!entry.left.defined()) continue;
    if (entry.exchanged || !put_back(entry.parameter.tensor, entry.left)) {
      entry.parameter.tensor.set_data(entry.left);
    }
  }
}

void ParameterRule::roll_back() {
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    restore(entry);
    entry.written = entry.exchanged = false;
    entry.left.reset();
    entry.disagree.reset();
  }
  memory_.rest();
  seen_.clear();
  sees_ = written_ = false;
  first_ = true;
  second_pass_ = false;
}

}  // namespace infinitybatch
