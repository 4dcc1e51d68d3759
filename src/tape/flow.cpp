#include "tape/flow.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace infinitybatch::tape {
namespace {

/// Ops whose result takes its form from their argument, and none of its values.
bool makes_constant(const OpFacts& facts) {
  constexpr std::array<std::string_view, 6> kNames{"aten::zeros_like", "aten::ones_like",
                                                   "aten::full_like",  "aten::new_zeros",
                                                   "aten::new_ones",   "aten::new_full"};
  return facts.leaves_raw || std::find(kNames.begin(), kNames.end(), facts.name()) != kNames.end();
}

}  // namespace

Flow::Flow(const Tape& tape, const Batch& inputs) : tape_(tape), values_(tape.value_count, false) {
  for (const External& external : tape.externals) {
    if (external.input_leaf < 0) continue;
    const Leaf& leaf = inputs.leaves()[static_cast<size_t>(external.input_leaf)];
    if (leaf.batch_dim != Leaf::kShared) mark(external.value);
  }
}

void Flow::mark(ValueId value) {
  values_[value] = true;
  if (tape_.memories[value] != kNoMemory) memories_.insert(tape_.memories[value]);
}

bool Flow::meets(const Op& op) const {
  bool given = false;
  for_each_argument(tape_, op, [&](ValueId value, const Slot&) { given = given || has(value); });
  return given;
}

void Flow::pass(const Op& op) {
  if (!meets(op) || makes_constant(*op.facts)) return;
  for_each_argument(tape_, op, [&](ValueId value, const Slot& slot) {
    if (op.facts->written[slot.argument]) mark(value);
  });
  for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
    const ValueId output = tape_.outputs[o];
    if (output != kNoValue && !is_clean_view(op, output)) mark(output);
  }
}

bool Flow::is_clean_view(const Op& op, ValueId output) const {
  const uint32_t memory = tape_.memories[output];
  if (memory == kNoMemory || memories_.count(memory) != 0) return false;
  bool view = false;
  for_each_argument(tape_, op, [&](ValueId value, const Slot&) {
    view = view || tape_.memories[value] == memory;
  });
  return view;
}

bool is_index(const Op& op, const Slot& slot) {
  const std::string& name = op.facts->handle.schema().arguments()[slot.argument].name();
  return name == "index" || name == "indices";
}

std::vector<bool> lead_to(const Tape& tape, const std::vector<bool>& outputs, bool indices) {
  std::unordered_set<ValueId> values;
  std::unordered_set<uint32_t> memories;
  const auto need = [&](ValueId value) {
    values.insert(value);
    if (tape.memories[value] != kNoMemory) memories.insert(tape.memories[value]);
  };
  for (size_t i = 0; i < tape.result_values.size() && i < outputs.size(); ++i) {
    if (outputs[i] && tape.result_values[i] != kNoValue) need(tape.result_values[i]);
  }
  std::vector<bool> leads(tape.ops.size(), false);
  for (size_t i = tape.ops.size(); i-- > 0;) {
    const Op& op = tape.ops[i];
    if (op.facts == nullptr) continue;
    const auto needed = [&](ValueId value) {
      return value != kNoValue &&
             (values.contains(value) || memories.contains(tape.memories[value]));
    };
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      leads[i] = leads[i] || needed(tape.outputs[o]);
    }
    for_each_argument(tape, op, [&](ValueId value, const Slot& slot) {
      leads[i] = leads[i] || (op.facts->written[slot.argument] && needed(value));
    });
    if (!leads[i]) continue;
    for_each_argument(tape, op, [&](ValueId value, const Slot& slot) {
      if (indices || !is_index(op, slot)) need(value);
    });
  }
  return leads;
}

}  // namespace infinitybatch::tape
