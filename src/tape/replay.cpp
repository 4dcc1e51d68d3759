#include "generators.hpp"
#include "memories.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/tape/tape.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>

namespace infinitybatch::tape {
namespace {

/// Puts the state of every generator back that a tape sets.
class GeneratorsGuard {
 public:
  explicit GeneratorsGuard(const Tape& tape) {
    for (const Draw& draw : tape.initial)
      before_.push_back({draw.generator, state_of(draw.generator)});
    for (const Draw& draw : tape.draws) {
      if (draw.passed) before_.push_back({draw.generator, state_of(draw.generator)});
    }
  }
  ~GeneratorsGuard() {
    // In reverse: a generator that is met twice ends as it was found first.
    for (size_t i = before_.size(); i-- > 0;) set_state(before_[i].generator, before_[i].state);
  }
  GeneratorsGuard(const GeneratorsGuard&) = delete;
  GeneratorsGuard& operator=(const GeneratorsGuard&) = delete;

 private:
  std::vector<Draw> before_;
};

class Player {
 public:
  Player(const Tape& tape, const Batch& inputs) : tape_(tape), values_(tape.value_count) {
    for (const External& external : tape.externals)
      values_[external.value] = bind(external, inputs);
  }

  Batch play() {
    const ModesGuard modes;
    const GeneratorsGuard generators(tape_);
    for (const Draw& draw : tape_.initial) set_state(draw.generator, draw.state);
    for (const Op& op : tape_.ops) {
      if (op.modes != modes_) change_modes(op.modes);
      if (op.facts == nullptr) {
        restore();
      } else {
        call(op);
      }
      for (uint32_t i = op.releases.begin; i < op.releases.end; ++i) {
        values_[tape_.releases[i]].reset();
      }
    }
    if (cached_casts_) at::autocast::clear_cache();
    std::vector<Leaf> leaves = tape_.result.leaves();
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (tape_.result_values[i] != kNoValue) leaves[i].tensor = values_[tape_.result_values[i]];
    }
    return {std::move(leaves), tape_.result.structure()};
  }

 private:
  static at::Tensor bind(const External& external, const Batch& inputs) {
    if (external.before.defined()) {
      // The tape writes into it: on a copy of what the recording found.
      const at::NoGradGuard no_grad;
      return external.before.clone();
    }
    if (external.input_leaf >= 0) {
      return inputs.leaves()[static_cast<size_t>(external.input_leaf)].tensor;
    }
    if (external.version && !external.is_buffer &&
        external.tensor._version() != *external.version) {
      throw StateError("a tensor of shape " + c10::str(external.tensor.sizes()) +
                       " that forward read has been changed in place since (version " +
                       std::to_string(external.tensor._version()) + ", expected " +
                       std::to_string(*external.version) + "); run backward before changing it");
    }
    return external.tensor;
  }

  void change_modes(uint32_t modes) {
    tape_.modes[modes].apply();
    modes_ = modes;
    const bool in_autocast = tape_.modes[modes].in_autocast;
    // Where the outermost region begins nothing is cached, and where it ends all is forgotten.
    if (in_autocast != cached_casts_) at::autocast::clear_cache();
    cached_casts_ = in_autocast;
  }

  void restore() {
    const auto& [value, content] = tape_.restores[restored_++];
    // Past autograd's version counter, as the one who wrote it then.
    const at::NoGradGuard no_grad;
    bytes_of(values_[value]).copy_(content);
  }

  void call(const Op& op) {
    for (uint32_t d = op.draws.begin; d < op.draws.end; ++d) {
      set_state(tape_.draws[d].generator, tape_.draws[d].state);
    }
    stack_.assign(tape_.arguments.begin() + op.arguments.begin,
                  tape_.arguments.begin() + op.arguments.end);
    for (uint32_t s = op.slots.begin; s < op.slots.end; ++s) {
      const Slot& slot = tape_.slots[s];
      stack_[slot.argument] = argument(slot);
    }
    op.facts->handle.callBoxed(stack_);
    uint32_t output = op.outputs.begin;
    const auto take = [&](const at::Tensor& tensor) {
      const ValueId value = tape_.outputs[output++];
      if (value != kNoValue) values_[value] = tensor;
    };
    for (const c10::IValue& result : stack_) {
      if (result.isTensorList()) {
        for (const c10::IValue& element : result.toListRef()) take(element.toTensor());
      } else if (result.isTensor()) {
        take(result.toTensor());
      }
    }
    stack_.clear();
  }

  c10::IValue argument(const Slot& slot) const {
    if (slot.kind == Slot::Kind::tensor) return values_[slot.first];
    const auto element = [&](uint32_t i) { return tape_.elements[slot.first + i]; };
    if (slot.kind == Slot::Kind::list) {
      c10::List<at::Tensor> list;
      list.reserve(slot.count);
      for (uint32_t i = 0; i < slot.count; ++i) {
        list.push_back(element(i) == kNoValue ? at::Tensor() : values_[element(i)]);
      }
      return list;
    }
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(slot.count);
    for (uint32_t i = 0; i < slot.count; ++i) {
      list.push_back(element(i) == kNoValue ? std::nullopt : std::optional(values_[element(i)]));
    }
    return list;
  }

  const Tape& tape_;
  std::vector<at::Tensor> values_;
  std::vector<c10::IValue> stack_;
  uint32_t modes_ = UINT32_MAX;
  size_t restored_ = 0;
  bool cached_casts_ = false;
};

}  // namespace

Batch replay(const Tape& tape, const Batch& inputs) {
  if (tape.opaque) {
    throw Unsupported("this forward cannot be replayed from its tape: " + *tape.opaque +
                      "; run it again");
  }
  return Player(tape, inputs).play();
}

}  // namespace infinitybatch::tape
