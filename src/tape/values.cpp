// The part of Program that tells tensors apart and finds out what was done to them.
#include "core/bits.hpp"
#include "tape/arguments.hpp"
#include "tape/program.hpp"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace infinitybatch::tape {
namespace {

/// A copy with the same strides, so that kernels run on it as they would on the original.
at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  return tensor.detach().clone();
}

}  // namespace

ValueId Program::use(const at::Tensor& tensor, Access access) {
  if (const char* why = strange(tensor)) {
    give_up(std::string(why) + " takes part in forward");
    return kNoValue;
  }
  const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
  ValueId value = kNoValue;
  if (found == numbers_.end()) {
    value = find_external(tensor);
  } else {
    value = found->second;
    if (const char* why = difference(values_[value], tensor)) {
      give_up(std::string("a tensor changed between two ops: ") + why);
    }
  }
  if (tape_.opaque) return kNoValue;
  Memory* memory = values_[value].memory;
  if (memory != nullptr && Memories::exported(*memory, tensor)) {
    if (!memory->raw) {
      give_up("memory of this forward was handed to NumPy, which may have written it");
      return kNoValue;
    }
    if (!tape_.host_read) tape_.host_read = "numpy()";
  }
  switch (access) {
    case Access::read:
      restore_raw(tensor, value);
      break;
    case Access::view:
      if (memory != nullptr && memory->raw) viewed_.emplace_back(tensor, value);
      break;
    case Access::write:
      before_write(tensor, value);
      written_.push_back(tensor);
      break;
  }
  return value;
}

ValueId Program::find_external(const at::Tensor& tensor) {
  const Memory* memory = memories_.find(tensor);
  if ((memory != nullptr && memory->made_here) || memories_.inside_another(tensor)) {
    give_up("memory of this forward comes back under another tensor (`.data`, numpy())");
    return kNoValue;
  }
  if (has_history(tensor)) {
    give_up("a tensor with a history of its own comes from outside of the recorded ops");
    return kNoValue;
  }
  if (memory != nullptr && is_written(*memory)) {
    give_up("forward reads memory that it has written through another tensor");
    return kNoValue;
  }
  return add_external(tensor, /*input_leaf=*/-1);
}

/// Whether an op has written it, where it is not of this call's making: replays write a copy.
bool Program::is_written(const Memory& memory) const {
  return std::any_of(memory.values.begin(), memory.values.end(), [this](ValueId alias) {
    const int64_t index = values_[alias].external;
    return index >= 0 && tape_.externals[static_cast<size_t>(index)].before.defined();
  });
}

ValueId Program::add_external(const at::Tensor& tensor, int64_t input_leaf) {
  External external;
  external.value = add_value(tensor);
  external.input_leaf = input_leaf;
  if (input_leaf < 0) external.tensor = tensor;
  external.is_buffer = buffers_.count(tensor.unsafeGetTensorImpl()) != 0;
  if (!tensor.is_inference()) external.version = static_cast<uint32_t>(tensor._version());
  if (const Memory* memory = values_[external.value].memory; memory != nullptr && memory->scaled) {
    external.version.reset();
  }
  values_[external.value].external = static_cast<int64_t>(tape_.externals.size());
  tape_.externals.push_back(std::move(external));
  return tape_.externals.back().value;
}

ValueId Program::add_value(const at::Tensor& tensor) {
  const auto id = static_cast<ValueId>(values_.size());
  Memory* memory = memories_.add(tensor);
  values_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                     Provenance::of(tensor), memory});
  numbers_[tensor.unsafeGetTensorImpl()] = id;
  if (memory != nullptr) memory->values.push_back(id);
  return id;
}

void Program::look_again(Value& value, const at::Tensor& tensor) {
  const Provenance now = Provenance::of(tensor);
  if (now.storage != value.provenance.storage) value.memory = memories_.find(tensor);
  value.provenance = now;
}

void Program::restore_raw(const at::Tensor& tensor, ValueId value) {
  Memory* memory = values_[value].memory;
  if (memory == nullptr || !memory->raw) return;
  // Nobody who dispatches has written it: what is read there came another way (`torch.tensor`,
  // NumPy), and is a constant of this recording.
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  const at::Tensor bytes = bytes_of(tensor);
  if (memory->restored >= 0) {
    const at::Tensor& known = tape_.restores[static_cast<size_t>(memory->restored)].second;
    if (same_form(bytes, known) && !any_bit_differs(bytes, known).item<bool>()) return;
  }
  memory->restored = static_cast<int64_t>(tape_.restores.size());
  tape_.restores.emplace_back(value, bytes.clone());
  Op restore;
  restore.modes = op_.modes;
  tape_.ops.push_back(restore);
  if (!tape_.host_read) tape_.host_read = "memory written outside of the dispatcher";
}

void Program::before_write(const at::Tensor& tensor, ValueId value) {
  judge_write(tensor);
  Memory* memory = memories_.find(tensor);
  if (memory == nullptr) {
    if (values_[value].external >= 0) give_up("forward writes into a tensor without storage");
    return;
  }
  if (!facts_->writes_metadata) memory->raw = false;
  size_t externals = 0;
  for (const ValueId alias : memory->values) {
    const Value& known = values_[alias];
    const at::Tensor original(known.impl.lock());
    if (!original.defined()) continue;
    // The write will hide what was done to its aliases until now.
    if (const char* why = difference(known, original)) {
      return give_up(std::string("a tensor changed between two ops: ") + why);
    }
    if (known.external < 0) continue;
    if (++externals > 1) return give_up("forward writes into memory that two tensors share");
    External& external = tape_.externals.own()[static_cast<size_t>(known.external)];
    if (external.before.defined()) continue;
    if (original.requires_grad()) return give_up("forward writes into an input that requires grad");
    if (external.is_buffer && lent) external.before = lent(original);
    if (!external.before.defined()) external.before = copy_of(original);
  }
}

/// Whether it is neither made by this call, nor an input, nor a buffer.
bool Program::outlives_call(const at::Tensor& tensor) {
  if (has_history(tensor)) return false;
  c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr) return false;
  for (const at::Tensor& buffer : held_buffers_) {
    if (storage_of(buffer) == storage) return false;
  }
  const Memory* memory = memories_.find(tensor);
  if (memory == nullptr) return true;
  return !memory->made_here &&
         std::none_of(memory->values.begin(), memory->values.end(), [&](ValueId alias) {
           const int64_t index = values_[alias].external;
           return index >= 0 && tape_.externals[static_cast<size_t>(index)].input_leaf >= 0;
         });
}

/// `embedding_renorm_`: whoever reads these rows reads them scaled, in the recording as in replays.
void Program::begin_scaling(const at::Tensor& weight) {
  use(weight, Access::read);
  if (tape_.opaque) return;
  Memory* memory = memories_.find(weight);
  check_reads_before(*memory);
  memory->scaled = true;
  tape_.scales_rows = op_.aside = true;
  for (const ValueId alias : memory->values) {
    const int64_t index = values_[alias].external;
    if (index >= 0) tape_.externals.own()[static_cast<size_t>(index)].version.reset();
  }
  written_.push_back(weight);
}

/// What read other rows than those that were scaled by then would find them scaled in a replay.
void Program::check_reads_before(const Memory& weight) {
  for (const Op& op : tape_.ops) {
    if (op.facts == nullptr || op.aside) continue;
    bool reads = false;
    bool looks_up = false;
    for_each_argument(tape_, op, [&](ValueId value, const Slot& slot) {
      const bool here = values_[value].memory == &weight;
      reads = reads || (here && !op.facts->viewed[slot.argument]);
      looks_up = looks_up || (slot.argument == 1 && std::find(scaled_by_.begin(), scaled_by_.end(),
                                                              value) != scaled_by_.end());
    });
    if (!reads || (op.facts->looks_up && looks_up)) continue;
    return give_up(op.facts->name() + " reads a weight before max_norm rewrites rows of it");
  }
}

const char* Program::difference(const Value& value, const at::Tensor& now) {
  Provenance here = Provenance::of(now);
  const bool same =
      value.memory != nullptr && value.memory->scaled && here.storage == value.provenance.storage;
  if (same) here.version = value.provenance.version;
  return value.provenance.difference(here);
}

void Program::judge_write(const at::Tensor& tensor) {
  const Memory* memory = memories_.find(tensor);
  if (memory != nullptr && memory->made_here) return;
  if (has_history(tensor)) return;  // made by this call: nothing else has a history
  if (unseen_.contains(tensor)) return;
  if (memory != nullptr) {
    for (const ValueId alias : memory->values) {
      const int64_t index = values_[alias].external;
      if (index < 0) continue;
      if (tape_.externals[static_cast<size_t>(index)].input_leaf < 0) continue;
      input_written_ = true;
      return;
    }
  }
  c10::StorageImpl* storage = storage_of(tensor);
  for (const at::Tensor& buffer : held_buffers_) {
    if (buffer.is_same(tensor) || (storage != nullptr && storage_of(buffer) == storage)) return;
  }
  if (parameters && parameters->contains(storage)) {
    return give_up("forward writes into a parameter (" + facts_->name() + ")");
  }
  bool parameter = tensor.requires_grad();
  if (memory != nullptr) {
    for (const ValueId alias : memory->values) {
      parameter = parameter || values_[alias].provenance.requires_grad;
    }
  }
  if (parameter) {
    return refuse("forward changes a parameter in place (" + facts_->name() + ")");
  }
  std::string reason = "forward writes into a tensor that is not a buffer of the model (" +
                       facts_->name() +
                       "; use register_buffer(), or change a parameter outside of forward)";
  if (storage == nullptr) return;  // sparse: those of this call are not known from others
  leftovers_.emplace_back(tensor.storage().getWeakStorageImpl(), std::move(reason));
}

void Program::judge_leftovers() {
  if (leftovers_.empty()) return;
  // Replays start from copies of what is written: let go, and see who else holds it.
  for (External& external : tape_.externals.own()) {
    if (external.before.defined()) external.tensor.reset();
  }
  for (const auto& [storage, reason] : leftovers_) {
    if (!storage.expired()) refuse(reason);
  }
}

void Program::refresh(const at::Tensor& tensor) {
  const Memory* memory = memories_.find(tensor);
  if (memory == nullptr) {
    const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
    if (found != numbers_.end()) look_again(values_[found->second], tensor);
    return;
  }
  for (const ValueId alias : memory->values) {
    Value& value = values_[alias];
    const at::Tensor alive(value.impl.lock());
    if (alive.defined()) look_again(value, alive);
  }
}

ValueId Program::define(const at::Tensor& tensor) {
  if (const char* why = strange(tensor)) {
    give_up(facts_->name() + " gives " + why);
    return kNoValue;
  }
  const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
  if (found != numbers_.end()) {
    // In place, or given back as it came.
    look_again(values_[found->second], tensor);
    if (facts_->leaves_raw && facts_->writes) {
      if (Memory* memory = memories_.find(tensor); memory != nullptr && memory->made_here) {
        memory->raw = memory->from_empty = true;  // resize_
      }
    }
    return found->second;
  }
  const ValueId value = add_value(tensor);
  // Nobody else lies in memory that the op has made.
  if (Memory* memory = values_[value].memory; memory != nullptr && memory->values.size() == 1) {
    memory->made_here = true;
    memory->raw = memory->from_empty = facts_->leaves_raw;
  }
  return value;
}

void Program::check_externals() {
  for (const External& external : tape_.externals) {
    const Value& value = values_[external.value];
    const at::Tensor now(value.impl.lock());
    if (!now.defined()) continue;
    const char* why = difference(value, now);
    if (why == nullptr) continue;
    const Provenance here = Provenance::of(now);
    // After an op was only watched, inputs and buffers need not look as they did.
    if (!tape_.opaque) give_up(std::string("a tensor changed between two ops: ") + why);
    const bool content =
        here.storage != value.provenance.storage || here.version != value.provenance.version;
    // Buffers that are written through `.data` are the buffer rule's matter.
    const bool of_buffer =
        std::any_of(held_buffers_.begin(), held_buffers_.end(), [&](const at::Tensor& buffer) {
          return here.storage != nullptr && storage_of(buffer) == here.storage &&
                 here.storage == value.provenance.storage;
        });
    const bool of_parameter = parameters && parameters->contains(value.provenance.storage);
    if (content && external.input_leaf < 0 && !external.is_buffer && !of_buffer && !of_parameter) {
      refuse("forward changes a parameter, or a tensor that is not a buffer of the model: " +
             std::string(why));
    }
  }
}

}  // namespace infinitybatch::tape
