#include <infinitybatch/tape/counts.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <set>

namespace infinitybatch::tape {
namespace {

bool is_other_number(const c10::IValue& argument) {
  const auto other = [](double number) { return number != 0 && number != 1; };
  if (argument.isBool() || argument.isComplexDouble()) return false;
  if (argument.isInt()) return other(static_cast<double>(argument.toInt()));
  if (argument.isDouble()) return other(argument.toDouble());
  if (!argument.isList()) return false;
  const auto elements = argument.toListRef();
  return std::any_of(elements.begin(), elements.end(), is_other_number);
}

/// 0 and 1 are no counts of several samples. Elsewhere than on the CPU nobody looks.
bool is_other_number(const at::Tensor& constant) {
  if (constant.numel() != 1 || constant.requires_grad()) return false;
  if (constant.is_complex() || constant.scalar_type() == at::kBool) return false;
  return !constant.device().is_cpu() || is_other_number(c10::IValue(constant.item<double>()));
}

/// What lies where: buffers, and numbers that may count.
class ConstantCounts {
 public:
  explicit ConstantCounts(const Tape& tape) : tape_(tape) {
    for (const External& external : tape.externals) {
      const uint32_t memory = tape.memories[external.value];
      if (external.is_buffer) {
        buffers_.insert(memory);
      } else if (external.tensor.defined()) {
        constants_.insert(memory);
        if (is_other_number(external.tensor)) numbers_.insert(memory);
      }
    }
  }

  bool meet(const Op& op) {
    bool reads_buffer = false;
    bool has_number = false;
    bool is_constant = true;  // computed from constants alone
    const auto meet_value = [&](ValueId value) {
      if (value == kNoValue) return;
      const uint32_t memory = tape_.memories[value];
      reads_buffer = reads_buffer || buffers_.contains(memory);
      has_number = has_number || numbers_.contains(memory);
      is_constant = is_constant && constants_.contains(memory);
    };
    for (uint32_t i = op.slots.begin; i < op.slots.end; ++i) {
      const Slot& slot = tape_.slots[i];
      if (slot.kind == Slot::Kind::tensor) {
        meet_value(slot.first);
      } else {
        for (uint32_t at = 0; at < slot.count; ++at) meet_value(tape_.elements[slot.first + at]);
      }
    }
    for (uint32_t i = op.arguments.begin; i < op.arguments.end; ++i) {
      has_number = has_number || is_other_number(tape_.arguments[i]);
    }
    for (uint32_t i = op.outputs.begin; is_constant && i < op.outputs.end; ++i) {
      const ValueId value = tape_.outputs[i];
      if (value == kNoValue) continue;
      const uint32_t memory = tape_.memories[value];
      constants_.insert(memory);
      if (has_number && tape_.memory_bytes[memory] <= kOneNumber) numbers_.insert(memory);
    }
    return reads_buffer && has_number;
  }

 private:
  static constexpr int64_t kOneNumber = 16;  // bytes
  const Tape& tape_;
  std::set<uint32_t> buffers_;
  std::set<uint32_t> constants_;
  std::set<uint32_t> numbers_;
};

}  // namespace

bool may_count(const Tape& tape) {
  ConstantCounts counts(tape);
  return std::any_of(tape.ops.begin(), tape.ops.end(),
                     [&](const Op& op) { return counts.meet(op); });
}

}  // namespace infinitybatch::tape
