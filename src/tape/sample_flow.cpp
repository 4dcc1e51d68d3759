#include "tape/sample_flow.hpp"

#include "tape/flow.hpp"

namespace infinitybatch::tape {
namespace {

std::vector<const OpFacts*> ops_of_samples(const Tape& tape, const Batch& inputs) {
  std::vector<const OpFacts*> ops;
  Flow flow(tape, inputs);
  for (const Op& op : tape.ops) {
    if (op.facts == nullptr) continue;
    if (flow.meets(op)) ops.push_back(op.facts);
    flow.pass(op);
  }
  return ops;
}

}  // namespace

std::vector<bool> from_samples(const Tape& tape, const Batch& inputs) {
  const std::vector<ValueId>& results = tape.result_values;
  if (tape.opaque) return std::vector<bool>(results.size(), true);
  Flow flow(tape, inputs);
  for (const Op& op : tape.ops) {
    // Memory that is written outside of the dispatcher (`torch.tensor(0.5)`) holds numbers of
    // Python's.
    if (op.facts != nullptr) flow.pass(op);
  }
  std::vector<bool> found;
  for (const ValueId value : results) found.push_back(value == kNoValue || flow.has(value));
  return found;
}

bool same_of_samples(const Tape& a, const Tape& b, const Batch& inputs) {
  return ops_of_samples(a, inputs) == ops_of_samples(b, inputs);
}

}  // namespace infinitybatch::tape
