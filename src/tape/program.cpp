#include "program.hpp"

#include <infinitybatch/core/foreign_exception.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

namespace infinitybatch::tape {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// A copy with the same strides, so that kernels run on it as they would on the original.
at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  return tensor.detach().clone();
}

size_t saved_tensor_hooks() {
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size();
}

}  // namespace

Program::Program(const Batch& inputs, const std::vector<at::Tensor>& buffers,
                 const std::vector<at::Device>& devices)
    : held_buffers_(buffers), saved_tensor_hooks_(saved_tensor_hooks()) {
  generators_.push_back(at::globalContext().defaultGenerator(at::kCPU));
  for (const at::Device& device : devices) {
    if (device.is_cpu()) continue;
    generators_.push_back(at::globalContext().defaultGenerator(device));
    streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  for (const at::Generator& generator : generators_) {
    expected_.push_back(state_of(generator));
    tape_.initial.push_back({generator, expected_.back()});
  }
  for (size_t i = 0; i < held_buffers_.size(); ++i) {
    buffers_.emplace(held_buffers_[i].unsafeGetTensorImpl(), i);
  }
  const auto& leaves = inputs.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& tensor = leaves[i].tensor;
    if (!tensor.defined()) continue;
    if (const char* why = strange(tensor)) give_up(std::string("an input is ") + why);
    if (numbers_.contains(tensor.unsafeGetTensorImpl())) {
      give_up("one tensor is passed as two inputs");
      continue;
    }
    add_external(tensor, static_cast<int64_t>(i));
  }
}

void Program::give_up(std::string reason) {
  if (!tape_.opaque) tape_.opaque = std::move(reason);
}

void Program::begin(const at::RecordFunction& op) noexcept {
  if (op.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    // Once the recording is over nobody asks any more.
    return give_up("gradients are computed inside of forward");
  }
  if (depth_++ > 0 || tape_.opaque) return;
  try {
    begin_op(op);
  } catch (...) {
    // An exception of a callback would be swallowed.
    keep_foreign_exception(std::current_exception());
    failure_ = std::current_exception();
    give_up("the recording failed");
  }
}

void Program::end(const at::RecordFunction& op) noexcept {
  if (op.scope() == at::RecordScope::BACKWARD_FUNCTION || --depth_ > 0) return;
  if (!pending_) return;
  pending_ = false;
  if (tape_.opaque) return written_.clear();
  try {
    end_op(op);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    failure_ = std::current_exception();
    give_up("the recording failed");
  }
  written_.clear();
}

void Program::begin_op(const at::RecordFunction& op) {
  const OpFacts* facts = facts_of(op);
  if (facts == nullptr) {
    return give_up(std::string(op.name()) + " is no ATen operator (an autograd function)");
  }
  const auto inputs = op.inputs();
  if (inputs.size() != facts->argument_count) {
    return give_up(facts->name() + " hides its arguments");
  }
  if (saved_tensor_hooks() != saved_tensor_hooks_) {
    return give_up("saved-tensor hooks are set inside of forward (checkpointing)");
  }
  for (const c10::Stream& stream : streams_) {
    if (c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device()) != stream) {
      return give_up("forward changes the stream");
    }
  }
  op_ = Op();
  op_.facts = facts;
  op_.modes = modes_index();
  if (tape_.modes[op_.modes].intercepted()) {
    return give_up("a dispatch mode or functorch transform is active");
  }
  const auto position = [](const auto& array) { return static_cast<uint32_t>(array.size()); };
  // Restores that the arguments need come before the op.
  const uint32_t arguments = position(tape_.arguments);
  op_.slots.begin = position(tape_.slots);
  op_.draws.begin = position(tape_.draws);
  if (facts->draws) watch_generators();
  for (size_t i = 0; i < inputs.size(); ++i) take_argument(inputs[i], i, facts->written[i]);
  op_.arguments = {arguments, position(tape_.arguments)};
  op_.slots.end = position(tape_.slots);
  op_.draws.end = position(tape_.draws);
  if (facts->reads_values && !tape_.host_read) tape_.host_read = facts->name();
  pending_ = true;
}

void Program::take_argument(const c10::IValue& argument, size_t position, bool written) {
  Slot slot;
  slot.argument = static_cast<uint16_t>(position);
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (!tensor.defined()) return tape_.arguments.push_back(argument);
    slot.first = use(tensor, written);
    tape_.slots.push_back(slot);
    tape_.arguments.emplace_back();
    return;
  }
  const bool optional = argument.isOptionalTensorList();
  if (!argument.isTensorList() && !optional) {
    if (argument.isGenerator()) take_passed_generator(argument.toGenerator());
    return tape_.arguments.push_back(argument);
  }
  slot.kind = optional ? Slot::Kind::optional_list : Slot::Kind::list;
  // Elements may put restores in front of the op, so that their numbers are collected first.
  std::vector<ValueId> elements;
  for (const c10::IValue& element : argument.toListRef()) {
    const bool there = element.isTensor() && element.toTensor().defined();
    elements.push_back(there ? use(element.toTensor(), written) : kNoValue);
  }
  slot.first = static_cast<uint32_t>(tape_.elements.size());
  slot.count = static_cast<uint32_t>(elements.size());
  tape_.elements.insert(tape_.elements.end(), elements.begin(), elements.end());
  tape_.slots.push_back(slot);
  tape_.arguments.emplace_back();
}

ValueId Program::use(const at::Tensor& tensor, bool written) {
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
    const Provenance now = Provenance::of(tensor);
    if (const char* why = values_[value].provenance.difference(now)) {
      give_up(std::string("a tensor changed between two ops: ") + why);
    }
  }
  if (tape_.opaque) return kNoValue;
  if (written) {
    before_write(tensor, value);
    written_.push_back(tensor);
  } else {
    restore_raw(tensor, value);
  }
  return value;
}

ValueId Program::find_external(const at::Tensor& tensor) {
  const Memory* memory = memory_of(tensor);
  if ((memory != nullptr && memory->made_here) || lies_in_recorded_memory(tensor)) {
    give_up("memory of this forward comes back under another tensor (`.data`, numpy())");
    return kNoValue;
  }
  if (tensor.grad_fn()) {
    give_up("a tensor with a history of its own comes from outside of the recorded ops");
    return kNoValue;
  }
  return add_external(tensor, /*input_leaf=*/-1);
}

ValueId Program::add_external(const at::Tensor& tensor, int64_t input_leaf) {
  External external;
  external.value = add_value(tensor);
  external.input_leaf = input_leaf;
  if (input_leaf < 0) external.tensor = tensor;
  external.is_buffer = buffers_.contains(tensor.unsafeGetTensorImpl());
  if (!tensor.is_inference()) external.version = static_cast<uint32_t>(tensor._version());
  values_[external.value].external = static_cast<int64_t>(tape_.externals.size());
  tape_.externals.push_back(std::move(external));
  return tape_.externals.back().value;
}

ValueId Program::add_value(const at::Tensor& tensor) {
  const auto id = static_cast<ValueId>(values_.size());
  values_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                     Provenance::of(tensor)});
  numbers_[tensor.unsafeGetTensorImpl()] = id;
  if (c10::StorageImpl* storage = storage_of(tensor)) {
    auto place = memories_.find(storage);
    if (place == memories_.end()) {
      place = memories_.emplace(storage, Memory(tensor.storage().getWeakStorageImpl())).first;
    }
    place->second.values.push_back(id);
  }
  return id;
}

Program::Memory* Program::memory_of(const at::Tensor& tensor) {
  const auto found = memories_.find(storage_of(tensor));
  return found == memories_.end() ? nullptr : &found->second;
}

bool Program::lies_in_recorded_memory(const at::Tensor& tensor) const {
  const c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr || memories_.contains(storage)) return false;
  const auto* address = static_cast<const char*>(storage->data());
  if (address == nullptr) return false;
  for (const auto& [other, memory] : memories_) {
    if (!memory.made_here || memory.storage.expired()) continue;
    const auto* begin = static_cast<const char*>(other->data());
    if (begin != nullptr && address >= begin && address < begin + other->nbytes()) return true;
  }
  return false;
}

void Program::restore_raw(const at::Tensor& tensor, ValueId value) {
  Memory* memory = memory_of(tensor);
  if (memory == nullptr || !memory->raw) return;
  // Nobody who dispatches has written it: what is read there came another way (`torch.tensor`,
  // NumPy), and is a constant of this recording.
  tape_.restores.emplace_back(value, copy_of(tensor));
  Op restore;
  restore.modes = op_.modes;
  tape_.ops.push_back(restore);
  if (!tape_.host_read) tape_.host_read = "memory written outside of the dispatcher";
}

void Program::before_write(const at::Tensor& tensor, ValueId value) {
  Memory* memory = memory_of(tensor);
  if (memory == nullptr) {
    if (values_[value].external >= 0) give_up("forward writes into a tensor without storage");
    return;
  }
  memory->raw = false;
  size_t externals = 0;
  for (const ValueId alias : memory->values) {
    const int64_t index = values_[alias].external;
    if (index < 0) continue;
    if (++externals > 1) return give_up("forward writes into memory that two tensors share");
    External& external = tape_.externals[static_cast<size_t>(index)];
    if (external.before.defined()) continue;
    const at::Tensor original =
        external.tensor.defined() ? external.tensor
                                  : at::Tensor(values_[alias].impl.lock());
    if (original.defined() && original.requires_grad() && original.is_leaf()) {
      tape_.refusal = "forward changes a parameter in place (" + op_.facts->name() + ")";
    } else if (external.input_leaf < 0 && !external.is_buffer) {
      tape_.refusal = "forward writes into a tensor that is no buffer of the model (" +
                      op_.facts->name() + "); register it as one";
    }
    if (original.defined()) external.before = copy_of(original);
  }
}

void Program::refresh(const at::Tensor& tensor) {
  Memory* memory = memory_of(tensor);
  if (memory == nullptr) {
    const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
    if (found != numbers_.end()) values_[found->second].provenance = Provenance::of(tensor);
    return;
  }
  for (const ValueId alias : memory->values) {
    Value& value = values_[alias];
    const auto alive = value.impl.lock();
    if (alive) value.provenance = Provenance::of(at::Tensor(alive));
  }
}

void Program::end_op(const at::RecordFunction& op) {
  const auto& outputs = op.outputs();
  if (outputs.size() != op_.facts->return_count) {
    // It threw and user code went on: what it had written before is not known.
    if (op_.facts->writes) give_up(op_.facts->name() + " failed after it may have written");
    return;
  }
  op_.outputs.begin = static_cast<uint32_t>(tape_.outputs.size());
  for (const at::Tensor& tensor : written_) refresh(tensor);
  const auto take = [&](const c10::IValue& output) {
    const bool there = output.isTensor() && output.toTensor().defined();
    tape_.outputs.push_back(there ? define(output.toTensor()) : kNoValue);
  };
  for (const c10::IValue& output : outputs) {
    if (output.isTensorList()) {
      for (const c10::IValue& element : output.toListRef()) take(element);
    } else if (output.isTensor()) {
      take(output);
    }
  }
  op_.outputs.end = static_cast<uint32_t>(tape_.outputs.size());
  if (op_.facts->draws) remember_generators();
  tape_.ops.push_back(op_);
}

ValueId Program::define(const at::Tensor& tensor) {
  if (const char* why = strange(tensor)) {
    give_up(std::string(op_.facts->name()) + " gives " + why);
    return kNoValue;
  }
  const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
  if (found != numbers_.end()) {
    // In place, or given back as it came.
    values_[found->second].provenance = Provenance::of(tensor);
    return found->second;
  }
  const bool known_memory = memory_of(tensor) != nullptr;
  const ValueId value = add_value(tensor);
  if (Memory* memory = memory_of(tensor); memory != nullptr && !known_memory) {
    memory->made_here = true;
    memory->raw = op_.facts->leaves_raw;
  }
  return value;
}

void Program::watch_generators() {
  drew_ = true;
  for (size_t i = 0; i < generators_.size(); ++i) {
    at::Tensor now = state_of(generators_[i]);
    // User code seeded or drew in between.
    if (!same_state(now, expected_[i])) tape_.draws.push_back({generators_[i], std::move(now)});
  }
}

void Program::remember_generators() {
  for (size_t i = 0; i < generators_.size(); ++i) expected_[i] = state_of(generators_[i]);
}

void Program::take_passed_generator(const at::Generator& generator) {
  for (const at::Generator& known : generators_) {
    if (known == generator) return;
  }
  tape_.draws.push_back({generator, state_of(generator), /*passed=*/true});
}

uint32_t Program::modes_index() {
  const Modes now = Modes::current();
  for (size_t i = tape_.modes.size(); i-- > 0;) {
    if (tape_.modes[i] == now) return static_cast<uint32_t>(i);
  }
  tape_.modes.push_back(now);
  return static_cast<uint32_t>(tape_.modes.size() - 1);
}

Tape Program::finish(const Batch& outputs) {
  if (failure_) std::rethrow_exception(failure_);
  op_ = Op();
  op_.modes = modes_index();
  std::vector<Leaf> leaves = outputs.leaves();
  std::vector<at::Tensor> roots;
  for (Leaf& leaf : leaves) {
    if (!leaf.tensor.defined() || tape_.opaque) {
      tape_.result_values.push_back(kNoValue);
      continue;
    }
    tape_.result_values.push_back(use(leaf.tensor, /*written=*/false));
    roots.push_back(std::exchange(leaf.tensor, at::Tensor()));
  }
  if (!tape_.opaque) {
    if (const char* why = hooked(roots)) give_up(why);
  }
  if (tape_.opaque) {
    // Nothing of it will be used: let go of what it holds.
    Tape empty;
    empty.opaque = tape_.opaque;
    empty.refusal = tape_.refusal;
    return empty;
  }
  tape_.result = Batch(std::move(leaves), outputs.structure());
  tape_.value_count = values_.size();
  if (!drew_) {
    bool touched = false;
    for (size_t i = 0; i < generators_.size(); ++i) {
      touched = touched || !same_state(state_of(generators_[i]), expected_[i]);
    }
    if (!touched) tape_.initial.clear();
  }
  trim(tape_);
  return std::move(tape_);
}

}  // namespace infinitybatch::tape
