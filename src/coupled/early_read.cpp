#include <infinitybatch/tape/arguments.hpp>

#include <infinitybatch/coupled/whole_batch_op.hpp>

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
    for (const tape::Op& op : tape_.ops) {
      if (op.facts == nullptr) continue;
      if (is_provisional(tape_, op)) {
        tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot& slot) {
          if (op.facts->written[slot.argument]) statistics_.insert(tape_.memories[value]);
        });
        spread(op);
        continue;
      }
      bool reads = false;
      bool statistics = false;
      tape::for_each_argument(tape_, op, [&](tape::ValueId value, const tape::Slot&) {
        const uint32_t memory = tape_.memories[value];
        reads = reads || values_[value] || memories_.count(memory) != 0;
        statistics = statistics || statistics_.count(memory) != 0;
      });
      if (statistics) return op.facts->name() + " (of running statistics)";
      if (!reads) continue;
      if (op.reads_values) return op.facts->name();
      spread(op);
    }
    return std::nullopt;
  }

 private:
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
  std::unordered_set<uint32_t> statistics_;
};

}  // namespace

std::optional<std::string> early_read(const tape::Tape& tape) {
  return Provisional(tape).first_read();
}

}  // namespace infinitybatch::coupled
