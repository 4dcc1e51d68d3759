#include <infinitybatch/tape/sample_flow.hpp>

#include <infinitybatch/tape/arguments.hpp>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>

namespace infinitybatch::tape {
namespace {

/// Ops whose result takes its form from their argument, and none of its values.
bool makes_constant(const OpFacts& facts) {
  constexpr std::array<std::string_view, 6> kNames{"aten::zeros_like", "aten::ones_like",
                                                   "aten::full_like",  "aten::new_zeros",
                                                   "aten::new_ones",   "aten::new_full"};
  return facts.leaves_raw || std::find(kNames.begin(), kNames.end(), facts.name()) != kNames.end();
}

class Flow {
 public:
  explicit Flow(const Tape& tape) : tape_(tape), values_(tape.value_count, false) {}

  void mark(ValueId value) {
    values_[value] = true;
    if (tape_.memories[value] != kNoMemory) memories_.insert(tape_.memories[value]);
  }

  bool has(ValueId value) const {
    return values_[value] || memories_.count(tape_.memories[value]) != 0;
  }

  void pass(const Op& op) {
    bool given = false;
    for_each_argument(tape_, op, [&](ValueId value, const Slot&) { given = given || has(value); });
    if (!given || makes_constant(*op.facts)) return;
    for_each_argument(tape_, op, [&](ValueId value, const Slot& slot) {
      if (op.facts->written[slot.argument]) mark(value);
    });
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const ValueId output = tape_.outputs[o];
      if (output != kNoValue && !is_clean_view(op, output)) mark(output);
    }
  }

 private:
  /// A view, or the tensor itself, of an argument that holds nothing of the samples: `a.expand_as`.
  bool is_clean_view(const Op& op, ValueId output) const {
    const uint32_t memory = tape_.memories[output];
    if (memory == kNoMemory || memories_.count(memory) != 0) return false;
    bool view = false;
    for_each_argument(tape_, op, [&](ValueId value, const Slot&) {
      view = view || tape_.memories[value] == memory;
    });
    return view;
  }

  const Tape& tape_;
  std::vector<bool> values_;
  std::unordered_set<uint32_t> memories_;
};

}  // namespace

std::vector<bool> from_samples(const Tape& tape, const Batch& inputs) {
  const std::vector<ValueId>& results = tape.result_values;
  if (tape.opaque) return std::vector<bool>(results.size(), true);
  Flow flow(tape);
  for (const External& external : tape.externals) {
    if (external.input_leaf < 0) continue;
    const Leaf& leaf = inputs.leaves()[static_cast<size_t>(external.input_leaf)];
    if (leaf.batch_dim != Leaf::kShared) flow.mark(external.value);
  }
  for (const Op& op : tape.ops) {
    // Memory that is written outside of the dispatcher (`torch.tensor(0.5)`) holds numbers of
    // Python's.
    if (op.facts != nullptr) flow.pass(op);
  }
  std::vector<bool> found;
  for (const ValueId value : results) found.push_back(value == kNoValue || flow.has(value));
  return found;
}

}  // namespace infinitybatch::tape
