#pragma once

#include "tape/memories.hpp"
#include "tape/segment.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::tape {

/// Sees a tape's ops while a Player runs them.
class PlayObserver {
 public:
  virtual ~PlayObserver() = default;
  /// \param stack the op's arguments, to be replaced by its results
  /// \returns false where the op shall run
  virtual bool stand_in(uint32_t /*op*/, std::vector<c10::IValue>& /*stack*/) { return false; }
  virtual void after(uint32_t /*op*/, const std::vector<c10::IValue>& /*results*/) {}
};

/// Runs ops on values. Modes are put back by whoever made it.
class Player {
 public:
  /// \param values one for each of the tape's
  /// \param restored index into Tape::restores of the first one
  /// \param observer null where nobody looks on
  /// \param graph false: no op makes a graph, whatever the recording's grad mode was
  Player(const Tape& tape, std::vector<at::Tensor>& values, size_t restored,
         PlayObserver* observer = nullptr, bool graph = true)
      : tape_(tape), values_(values), restored_(restored), observer_(observer), graph_(graph) {}

  /// The rows are not those of the recording.
  void check_witnesses() { checks_ = true; }

  void bind(const External& external, const Batch& inputs) {
    values_[external.value] = found(external, inputs);
  }

  void bind(const External& external, at::Tensor tensor) {
    values_[external.value] = std::move(tensor);
  }

  void lend(const External& external) { values_[external.value] = external.tensor; }

  /// \param first stands in for the first op, where set
  void play(Range ops, const StandIn& first) {
    for (uint32_t i = ops.begin; i < ops.end; ++i) {
      const Op& op = tape_.ops[i];
      if (op.modes != modes_) change_modes(op.modes);
      if (op.facts == nullptr) {
        restore();
      } else {
        set_generators(op);
        std::vector<c10::IValue>& stack = arguments(op);
        if (i == ops.begin && first) {
          at::Tensor result = first(stack);
          stack.assign(1, std::move(result));
        } else if (observer_ == nullptr || !observer_->stand_in(i, stack)) {
          op.facts->handle.callBoxed(stack);
          if (checks_ && op.witness != kNoWitness) {
            check(tape_.witnesses[op.witness], *op.facts, stack);
          }
        }
        if (observer_ != nullptr) observer_->after(i, stack);
        take_results(op);
      }
      for (uint32_t r = op.releases.begin; r < op.releases.end; ++r) {
        values_[tape_.releases[r]].reset();
      }
    }
    if (cached_casts_) at::autocast::clear_cache();
  }

  std::vector<c10::IValue>& arguments(const Op& op) {
    stack_.assign(tape_.arguments.begin() + op.arguments.begin,
                  tape_.arguments.begin() + op.arguments.end);
    for (uint32_t s = op.slots.begin; s < op.slots.end; ++s) {
      const Slot& slot = tape_.slots[s];
      stack_[slot.argument] = argument(slot);
    }
    return stack_;
  }

  /// What the tape begins with. \throws StateError where it has been changed since
  static at::Tensor found(const External& external, const Batch& inputs) {
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

 private:
  void change_modes(uint32_t modes) {
    tape_.modes[modes].apply();
    if (!graph_) c10::GradMode::set_enabled(false);
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

  void set_generators(const Op& op) {
    for (uint32_t d = op.draws.begin; d < op.draws.end; ++d) {
      tape_.draws[d].state.put_back(tape_.draws[d].generator);
    }
  }

  void take_results(const Op& op) {
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
  std::vector<at::Tensor>& values_;
  size_t restored_;
  PlayObserver* observer_;
  bool graph_;
  bool checks_ = false;
  std::vector<c10::IValue> stack_;
  uint32_t modes_ = UINT32_MAX;
  bool cached_casts_ = false;
};

}  // namespace infinitybatch::tape
