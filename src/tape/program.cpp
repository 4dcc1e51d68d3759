#include "tape/program.hpp"

#include "tape/witness.hpp"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

namespace infinitybatch::tape {
namespace {

constexpr const char* kHooks =
    "saved-tensor hooks are set inside of forward (as torch.utils.checkpoint does)";

/// Up to torch 2.11 a checkpoint that is not re-entrant calls this function first, in front of
/// setting its hooks where gradients are wanted, and does nothing of its own where none are.
bool begins_checkpoint(const std::string& function) {
  return function == "_NoopSaveInputs";
}

/// Why a function that is no operator ends the recording.
std::string reason_of(const std::string& function) {
  if (begins_checkpoint(function)) return kHooks;
  return function + " is no ATen operator (an autograd function)";
}

size_t saved_tensor_hooks() {
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size();
}

/// Arguments that mean the same whenever the op runs: no storages, script objects, futures.
bool is_plain(const c10::IValue& value) {
  if (value.isInt() || value.isNone() || value.isBool() || value.isDouble() || value.isIntList() ||
      value.isString() || value.isDevice() || value.isGenerator() || value.isComplexDouble() ||
      value.isDoubleList() || value.isBoolList() || value.isComplexDoubleList()) {
    return true;
  }
  if (value.isTuple() || !value.isList()) return false;
  const auto elements = value.toListRef();
  return std::all_of(elements.begin(), elements.end(), is_plain);
}

/// How long the tape became that this thread recorded last. The next is most likely as long.
struct Lengths {
  size_t values = 0;
  size_t ops = 0;
  size_t arguments = 0;
  size_t slots = 0;
  size_t outputs = 0;
  size_t externals = 0;
};
thread_local Lengths last_lengths;

template <typename Array>
uint32_t position(const Array& array) {
  return static_cast<uint32_t>(array.size());
}

/// `x[mask]`: how many elements there are depends on the mask's values.
bool selects_by_mask(const OpFacts& facts, c10::ArrayRef<c10::IValue> inputs) {
  if (facts.name() != "aten::index" || inputs.size() < 2 || !inputs[1].isList()) return false;
  const auto indices = inputs[1].toListRef();
  return std::any_of(indices.begin(), indices.end(), [](const c10::IValue& index) {
    if (!index.isTensor() || !index.toTensor().defined()) return false;
    const at::ScalarType type = index.toTensor().scalar_type();
    return type == at::kBool || type == at::kByte;
  });
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) visit(element.toTensor());
    }
  }
}

}  // namespace

Program::Program(const Batch& inputs, const std::vector<at::Tensor>& buffers,
                 const std::vector<at::Device>& devices)
    : held_buffers_(buffers),
      generators_(devices),
      unseen_(devices),
      saved_tensor_hooks_(saved_tensor_hooks()) {
  values_.reserve(last_lengths.values);
  numbers_.reserve(last_lengths.values);
  memories_.reserve(last_lengths.values);
  tape_.ops.own().reserve(last_lengths.ops);
  tape_.arguments.own().reserve(last_lengths.arguments);
  tape_.slots.own().reserve(last_lengths.slots);
  tape_.outputs.own().reserve(last_lengths.outputs);
  tape_.externals.own().reserve(last_lengths.externals);
  for (const at::Device& device : devices) {
    if (device.is_cpu()) continue;
    streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  for (size_t i = 0; i < held_buffers_.size(); ++i) {
    buffers_.emplace(held_buffers_[i].unsafeGetTensorImpl(), i);
  }
  const auto& leaves = inputs.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& tensor = leaves[i].tensor;
    if (!tensor.defined() || numbers_.count(tensor.unsafeGetTensorImpl()) != 0) continue;
    if (const char* why = strange(tensor)) give_up(std::string("an input is ") + why);
    add_external(tensor, static_cast<int64_t>(i));
  }
}

void Program::give_up(std::string reason) {
  if (!tape_.opaque) tape_.opaque = std::move(reason);
}

void Program::refuse(std::string reason) {
  if (!tape_.refusal) tape_.refusal = std::move(reason);
}

bool Program::threw() const {
  return std::uncaught_exceptions() > exceptions_;
}

std::unique_ptr<OpContext> Program::begin(const SeenOp& op) noexcept {
  if (inner != nullptr) inner->begin(op);
  errors_.guard([&] { meet(op); });
  if (errors_.any()) errors_.guard([&] { give_up("the recording failed"); });
  return nullptr;
}

void Program::meet(const SeenOp& op) {
  if (op.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    if (std::strstr(op.name(), "AccumulateGrad") != nullptr) {
      refuse("forward calls backward() itself, which adds to gradients");
    }
    return give_up("gradients are computed inside of forward");
  }
  if (depth_ > 0) {
    ++depth_;
    if (recording_ && tape_.modes[op_.modes].in_autocast) note_cast(op);
    if (recording_ && witnesses && !shows_values_) {
      const OpFacts* inner = op.facts();
      shows_values_ = inner != nullptr && inner->reads_values;
    }
    return;
  }
  const OpFacts* facts = op.facts();
  if (facts == nullptr) {
    // What it calls is watched as if forward had called it.
    unseen_.watch();
    const std::string name = op.name();
    if (name.starts_with("autograd::engine::")) {
      return give_up("gradients are computed inside of forward");
    }
    if (name.starts_with("TorchDynamo") || name.starts_with("Torch-Compiled")) {
      // Rather than what its compiler did first, if this is the first call.
      tape_.opaque = "forward calls compiled code";
      return;
    }
    if (begins_checkpoint(name) && !at::GradMode::is_enabled()) return;
    return give_up(reason_of(name));
  }
  ++depth_;
  facts_ = facts;
  exceptions_ = std::uncaught_exceptions();
  recording_ = !tape_.opaque;
  if (recording_) begin_op(op);
  if (tape_.opaque) {
    recording_ = false;
    watch_begin(op);
  }
}

void Program::end(const SeenOp& op, OpContext* context) noexcept {
  if (inner != nullptr) inner->end(op, context);
  if (op.scope() == at::RecordScope::BACKWARD_FUNCTION || depth_ == 0 || --depth_ > 0) return;
  errors_.guard([&] {
    if (recording_ && !tape_.opaque) {
      end_op(op);
    } else {
      watch_end(op);
    }
  });
  if (errors_.any()) errors_.guard([&] { give_up("the recording failed"); });
  recording_ = false;
  rise_.reset();
  written_.clear();
  viewed_.clear();
}

void Program::begin_op(const SeenOp& op) {
  const OpFacts& facts = *facts_;
  const auto stack = op.inputs();  // of the interpreter: what was there before comes first
  if (stack.size() < facts.argument_count) return give_up(facts.name() + " hides its arguments");
  const auto inputs = stack.slice(stack.size() - facts.argument_count);
  if (facts.forward_ad) return give_up("forward-mode gradients are computed inside of forward");
  if (saved_tensor_hooks() != saved_tensor_hooks_) {
    return give_up(kHooks);
  }
  for (const c10::Stream& stream : streams_) {
    if (c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device()) != stream) {
      return give_up("forward changes the stream");
    }
  }
  if (light) follow_guide();
  op_ = Op();
  op_.facts = &facts;
  op_.modes = modes_index();
  if (tape_.modes[op_.modes].intercepted()) {
    return give_up("a dispatch mode or functorch transform is active");
  }
  // Autocast forgets its casts where the outermost region ends.
  if (!tape_.modes[op_.modes].in_autocast) casts_.clear();
  const uint32_t arguments = position(tape_.arguments);
  given_.clear();
  op_.slots.begin = position(tape_.slots);
  op_.draws.begin = position(tape_.draws);
  if (facts.draws) generators_.before_draw(tape_.draws);
  if (facts.scales_rows && outlives_call(inputs[0].toTensor())) {
    begin_scaling(inputs[0].toTensor());
    if (tape_.opaque) return;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    take_argument(inputs[i], i);
    if (tape_.opaque) return;
  }
  op_.arguments = {arguments, position(tape_.arguments)};
  op_.slots.end = position(tape_.slots);
  op_.draws.end = position(tape_.draws);
  if (facts.reads_values && !tape_.host_read) tape_.host_read = facts.name();
  op_.reads_values = facts.reads_values || selects_by_mask(facts, inputs) || op_.aside;
  shows_values_ = witnesses && shows_values(facts, inputs);
  if (light) begin_cost();
}

void Program::take_argument(const c10::IValue& argument, size_t position_in_op) {
  const bool written = facts_->written[position_in_op] && !op_.aside;
  const Access access = written                          ? Access::write
                        : facts_->viewed[position_in_op] ? Access::view
                                                         : Access::read;
  Slot slot;
  slot.argument = static_cast<uint16_t>(position_in_op);
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (!tensor.defined()) return tape_.arguments.push_back(argument);
    slot.first = use(tensor, access);
    if (op_.aside && position_in_op == 1) scaled_by_.push_back(slot.first);
    tape_.slots.push_back(slot);
    tape_.arguments.push_back(c10::IValue());
    return;
  }
  const bool optional = argument.isOptionalTensorList();
  if (!argument.isTensorList() && !optional) {
    if (argument.isGenerator()) take_generator(argument.toGenerator());
    if (!is_plain(argument)) {
      return give_up(facts_->name() + " takes an argument that no tape can keep");
    }
    return tape_.arguments.push_back(argument);
  }
  slot.kind = optional ? Slot::Kind::optional_list : Slot::Kind::list;
  slot.first = position(tape_.elements);
  for (const c10::IValue& element : argument.toListRef()) {
    const bool there = element.isTensor() && element.toTensor().defined();
    tape_.elements.push_back(there ? use(element.toTensor(), access) : kNoValue);
  }
  slot.count = position(tape_.elements) - slot.first;
  tape_.slots.push_back(slot);
  tape_.arguments.push_back(c10::IValue());
}

void Program::take_generator(const at::Generator& generator) {
  if (generators_.watches(generator)) return;
  Draw draw{generator, GeneratorState(generator), /*passed=*/true};
  const auto known = std::find_if(passed_.begin(), passed_.end(),
                                  [&](const Draw& other) { return other.generator == generator; });
  const auto index = static_cast<size_t>(known - passed_.begin());
  if (known == passed_.end()) {
    passed_.push_back(draw);
    passed_after_.push_back(draw.state);
  } else if (!(passed_after_[index] == draw.state)) {
    tape_.seeds_own = true;
  }
  given_.push_back(index);
  if (!tape_.opaque) tape_.draws.push_back(std::move(draw));
}

/// Whether the op at work moved a generator that it was given. What moves others is no op.
bool Program::given_drew() {
  bool drew = false;
  for (const size_t i : given_) {
    GeneratorState now(passed_[i].generator);
    drew = drew || !(now == passed_after_[i]);
    passed_after_[i] = std::move(now);
  }
  given_.clear();
  return drew;
}

/// Whether what is no op moved one of the user's own generators behind its last draw.
bool Program::seeded_behind() const {
  for (size_t i = 0; i < passed_.size(); ++i) {
    if (!(GeneratorState(passed_[i].generator) == passed_after_[i])) return true;
  }
  return false;
}

void Program::note_cast(const SeenOp& op) {
  const OpFacts* facts = op.facts();
  if (facts == nullptr || !facts->casts) return;
  const auto stack = op.inputs();
  if (stack.size() < facts->argument_count) return;
  const auto inputs = stack.slice(stack.size() - facts->argument_count);
  const Modes& modes = tape_.modes[op_.modes];
  if (!modes.autocast_cache || !inputs[0].isTensor() || !inputs[1].isInt()) return;
  // The same condition as autocast's own.
  const at::Tensor& weight = inputs[0].toTensor();
  const auto type = static_cast<c10::ScalarType>(inputs[1].toInt());
  if (type != (weight.is_cpu() ? modes.autocast_on_cpu : modes.autocast_on_accelerator) ||
      weight.scalar_type() != at::kFloat || !weight.requires_grad() || !weight.is_leaf() ||
      weight.is_view()) {
    return;
  }
  if (std::find(casts_.begin(), casts_.end(), weight.unsafeGetTensorImpl()) != casts_.end()) {
    return give_up("a weight is cast again in another autocast region, with no op in between");
  }
  casts_.push_back(weight.unsafeGetTensorImpl());
}

void Program::end_op(const SeenOp& op) {
  const std::vector<c10::IValue>& stack = op.outputs();
  if (threw() || stack.size() < facts_->return_count) {
    // User code may go on: what it had written before is not known.
    if (facts_->writes) give_up(facts_->name() + " failed after it may have written");
    return;
  }
  const auto outputs = c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - facts_->return_count);
  for (const auto& [tensor, value] : viewed_) {
    bool copied = false;
    for (const c10::IValue& output : outputs) {
      for_each_tensor(output, [&](const at::Tensor& result) {
        copied = copied || storage_of(result) != storage_of(tensor);
      });
    }
    if (copied) restore_raw(tensor, value);
  }
  const bool own = given_drew();
  if (facts_->draws) {
    op_.drew = generators_.after_draw();
    if (own) op_.drew = true;
  }
  if (disturb && disturb(tape_, op_)) disturb_outputs(outputs);
  op_.outputs.begin = position(tape_.outputs);
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
  op_.outputs.end = position(tape_.outputs);
  if (shows_values_) {
    op_.witness = position(tape_.witnesses);
    tape_.witnesses.push_back(witness_of(*facts_, outputs));
  }
  if (light) end_cost(outputs);
  tape_.ops.push_back(op_);
}

void Program::disturb_outputs(c10::ArrayRef<c10::IValue> outputs) const {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  for (const c10::IValue& output : outputs) {
    for_each_tensor(output, [](const at::Tensor& tensor) {
      if (!tensor.is_floating_point()) return;
      at::Tensor elements = tensor.detach();
      for (int64_t d = 0; d < elements.dim(); ++d) {  // expanded: one for all
        if (elements.stride(d) == 0 && elements.size(d) > 1) elements = elements.narrow(d, 0, 1);
      }
      elements.mul_(1.5).add_(0.25);
    });
  }
}

void Program::watch_begin(const SeenOp& op) {
  const auto stack = op.inputs();
  if (stack.size() < facts_->argument_count) return;
  const auto inputs = stack.slice(stack.size() - facts_->argument_count);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].isGenerator()) take_generator(inputs[i].toGenerator());
    // A view of memory that was there before is no memory of this forward.
    if (facts_->viewed[i]) {
      for_each_tensor(inputs[i], [&](const at::Tensor& tensor) { memories_.add(tensor); });
    }
    if (!facts_->written[i]) continue;
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!facts_->scales_rows || !outlives_call(tensor)) return judge_write(tensor);
      if (Memory* memory = memories_.add(tensor)) memory->scaled = true;
    });
  }
}

void Program::watch_end(const SeenOp& op) {
  for (const c10::IValue& output : op.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (memories_.find(tensor) != nullptr) return;
      if (Memory* memory = memories_.add(tensor)) memory->made_here = true;
    });
  }
}

uint32_t Program::modes_index() {
  const Modes now = Modes::current();
  if (last_modes_ < tape_.modes.size() && tape_.modes[last_modes_] == now) return last_modes_;
  const auto known = std::find(tape_.modes.begin(), tape_.modes.end(), now);
  last_modes_ = static_cast<uint32_t>(known - tape_.modes.begin());
  if (known == tape_.modes.end()) tape_.modes.push_back(now);
  return last_modes_;
}

Tape Program::finish(const Batch& outputs) {
  rethrow();
  op_ = Op();
  if (!tape_.opaque) op_.modes = modes_index();
  std::vector<Leaf> leaves = outputs.leaves();
  std::vector<at::Tensor> roots;
  for (Leaf& leaf : leaves) {
    if (!leaf.tensor.defined() || tape_.opaque) {
      tape_.result_values.push_back(kNoValue);
      continue;
    }
    tape_.result_values.push_back(use(leaf.tensor, Access::read));
    roots.push_back(std::exchange(leaf.tensor, at::Tensor()));
  }
  if (!tape_.opaque) {
    if (const char* why = hooked(roots, separated_)) give_up(why);
  }
  separated_.clear();
  if (light) note_program();
  check_externals();
  judge_leftovers();
  if (tape_.opaque && input_written_) {
    refuse("forward writes into its inputs and has to run again (" + *tape_.opaque +
           "), which would write twice");
  }
  if (tape_.opaque) {
    // Nothing of it will be used: let go of what it holds.
    Tape empty;
    empty.opaque = tape_.opaque;
    empty.refusal = tape_.refusal;
    empty.initial = generators_.initial();
    empty.initial.insert(empty.initial.end(), passed_.begin(), passed_.end());
    return empty;
  }
  last_lengths = {values_.size(),     tape_.ops.size(),     tape_.arguments.size(),
                  tape_.slots.size(), tape_.outputs.size(), tape_.externals.size()};
  tape_.result = Batch(std::move(leaves), outputs.structure());
  tape_.value_count = values_.size();
  tape_.memories.own().assign(values_.size(), kNoMemory);
  memories_.number(tape_.memories.own(), tape_.memory_bytes.own());
  const bool strayed = generators_.strayed();
  tape_.strayed = tape_.strayed || strayed;
  tape_.seeds_own = tape_.seeds_own || seeded_behind();
  if (strayed || generators_.drew()) tape_.initial = generators_.initial();
  return std::move(tape_);
}

}  // namespace infinitybatch::tape
