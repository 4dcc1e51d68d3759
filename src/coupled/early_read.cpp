#include "coupled/whole_batch_op.hpp"
#include "tape/arguments.hpp"

#include <unordered_set>

namespace infinitybatch::coupled {
namespace {

/// Follows values that a provisional recording has wrong, from op to op and through memory.
class Provisional {
 public:
  explicit Provisional(const tape::Tape& tape)
      : tape_(tape), values_(tape.value_count, false), found_(tape.value_count) {
    for (const tape::External& external : tape.externals) found_[external.value] = true;
  }

  std::optional<std::string> first_read() {
    find_statistics();
    for (const tape::Op& op : tape_.ops) {
      if (op.facts == nullptr) continue;
      if (draws_for_all(tape_, op)) {
        spread(op);
        continue;
      }
      if (is_provisional(tape_, op)) {
        tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot& slot) {
          if (op.facts->written[slot.argument]) updated_.insert(tape_.memories[value]);
        });
        spread(op);
        continue;
      }
      bool reads = false;
      bool statistics = false;
      // Of `x[mask]` only the mask decides about the shape.
      const bool by_mask = op.reads_values && op.facts->name() == "aten::index";
      bool indices = false;
      tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot& slot) {
        const uint32_t memory = tape_.memories[value];
        const bool here = values_[value] || memories_.count(memory) != 0;
        reads = reads || here;
        indices = indices || (here && slot.argument == 1);
        statistics = statistics || updated_.count(memory) != 0 ||
                     (op.facts->written[slot.argument] && statistics_.count(memory) != 0);
      });
      if (statistics) return op.facts->name() + " (of running statistics)";
      if (!reads) continue;
      if (op.reads_values && (!by_mask || indices)) return op.facts->name();
      spread(op);
    }
    return std::nullopt;
  }

 private:
  void find_statistics() {
    for (const tape::Op& op : tape_.ops) {
      if (!is_provisional(tape_, op) || draws_for_all(tape_, op)) continue;
      tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot& slot) {
        if (op.facts->written[slot.argument]) statistics_.insert(tape_.memories[value]);
      });
    }
  }

  void spread(const tape::Op& op) {
    const auto mark = [this](tape::ValueId value) {
      values_[value] = true;
      if (tape_.memories[value] != tape::kNoMemory) memories_.insert(tape_.memories[value]);
    };
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const tape::ValueId output = tape_.outputs[o];
      // A view of a parameter, or the tensor itself handed back, is not made by the op.
      if (output != tape::kNoValue && !found_[output]) mark(output);
    }
    tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot& slot) {
      if (op.facts->written[slot.argument] && statistics_.count(tape_.memories[value]) == 0) {
        mark(value);
      }
    });
  }

  const tape::Tape& tape_;
  std::vector<bool> values_;
  std::vector<bool> found_;
  std::unordered_set<uint32_t> memories_;
  std::unordered_set<uint32_t> statistics_;  // memories that some op of the whole batch updates
  std::unordered_set<uint32_t> updated_;     // so far
};

}  // namespace

std::optional<std::string> given_something_else(const tape::Tape& tape,
                                                const std::vector<bool>& from_samples) {
  std::vector<bool> values(tape.value_count, false);
  for (const tape::External& external : tape.externals) {
    if (external.input_leaf >= 0) {
      values[external.value] = from_samples[static_cast<size_t>(external.input_leaf)];
    }
  }
  for (const tape::Op& op : tape.ops) {
    if (op.facts == nullptr) continue;
    const bool embedding = op.facts->looks_up;
    const bool across = op.facts->name() == "infinitybatch::across_batch";
    bool any = false;
    bool wanted = true;  // those that the op takes for samples
    tape::for_each_argument(tape, op, [&](tape::ValueId value, const tape::Slot& slot) {
      any = any || values[value];
      const bool sample = across || slot.argument == (embedding ? 1 : 0);
      if (sample) wanted = wanted && values[value];
    });
    if (is_whole_batch_op(tape, op) && !draws_for_all(tape, op) && !wanted) return op.facts->name();
    for (uint32_t o = op.outputs.begin; any && o < op.outputs.end; ++o) {
      if (tape.outputs[o] != tape::kNoValue) values[tape.outputs[o]] = true;
    }
    // Written through one alias, read through another: rare in front of such an op, and then
    // refused.
  }
  return std::nullopt;
}

std::optional<std::string> early_read(const tape::Tape& tape) {
  return Provisional(tape).first_read();
}

}  // namespace infinitybatch::coupled
