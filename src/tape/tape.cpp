#include "tape/tape.hpp"

#include "core/recycled.hpp"
#include "tape/arguments.hpp"

#include <algorithm>
#include <unordered_set>

namespace infinitybatch::tape {
namespace {

/// Which memory somebody will read, from the last op on.
class Wanted {
 public:
  explicit Wanted(const Tape& tape) : tape_(tape) {
    for (const External& external : tape.externals) {
      if (external.is_buffer) buffers_.insert(tape.memories[external.value]);
    }
    for (const ValueId value : tape.result_values) {
      if (value != kNoValue) read(value);
    }
  }

  void read(ValueId value) { read_.insert(tape_.memories[value]); }

  /// Whether all that the op leaves is in buffers that nothing behind it reads.
  bool only_leaves(const Op& op) const {
    bool only = !op.facts->draws && op.witness == kNoWitness;
    for_each_argument(tape_, op, [&](ValueId value, const Slot& slot) {
      if (op.facts->written[slot.argument]) only = only && is_left(value);
    });
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const ValueId value = tape_.outputs[o];
      only = only && (value == kNoValue || is_left(value));
    }
    return only;
  }

 private:
  bool is_left(ValueId value) const {
    const uint32_t memory = tape_.memories[value];
    return memory != kNoMemory && buffers_.contains(memory) && !read_.contains(memory);
  }

  const Tape& tape_;
  std::unordered_set<uint32_t> buffers_;
  std::unordered_set<uint32_t> read_;
};

}  // namespace

void trim(Tape& tape, const std::function<bool(const Op&)>& may_go) {
  Arena<(size_t{1} << 12)> arena;
  std::pmr::vector<bool> needed(tape.value_count, false, arena.resource());
  for (const ValueId value : tape.result_values) {
    if (value != kNoValue) needed[value] = true;
  }
  std::pmr::vector<bool> keep(tape.ops.size(), false, arena.resource());
  size_t kept = 0;
  size_t restore = tape.restores.size();
  std::pmr::vector<ValueId> restored(tape.restores.empty() ? 0 : tape.ops.size(), kNoValue,
                                     arena.resource());
  std::optional<Wanted> wanted;
  if (may_go) wanted.emplace(tape);
  for (size_t i = tape.ops.size(); i-- > 0;) {
    const Op& op = tape.ops[i];
    if (op.facts == nullptr) {
      restored[i] = tape.restores[--restore].first;
      keep[i] = true;
      needed[restored[i]] = true;
      if (wanted) wanted->read(restored[i]);
      ++kept;
      continue;
    }
    if (op.aside) continue;
    keep[i] = op.facts->writes || op.facts->draws || op.witness != kNoWitness;
    for (uint32_t o = op.outputs.begin; o < op.outputs.end && !keep[i]; ++o) {
      keep[i] = tape.outputs[o] != kNoValue && needed[tape.outputs[o]];
    }
    if (keep[i] && wanted && wanted->only_leaves(op) && may_go(op)) keep[i] = false;
    if (!keep[i]) continue;
    ++kept;
    for_each_argument(tape, op, [&](ValueId value, const Slot&) {
      needed[value] = true;
      if (wanted) wanted->read(value);
    });
  }

  std::pmr::vector<bool> released(tape.value_count, false, arena.resource());
  for (const ValueId value : tape.result_values) {
    if (value != kNoValue) released[value] = true;  // handed to the caller instead
  }
  for (const External& external : tape.externals) {
    if (external.before.defined()) released[external.value] = true;  // its end may be asked for
  }
  // From the last op on: each value goes to the first that is met.
  std::vector<ValueId>& releases = tape.releases.own();
  std::vector<ValueId>& outputs = tape.outputs.own();
  std::vector<Op>& ops = tape.ops.own();
  releases.reserve(tape.value_count);
  for (size_t i = ops.size(); i-- > 0;) {
    if (!keep[i]) continue;
    Op& op = ops[i];
    const auto last_use = [&](ValueId value) {
      if (released[value]) return;
      released[value] = true;
      releases.push_back(value);
    };
    op.releases.begin = static_cast<uint32_t>(releases.size());
    if (op.facts == nullptr) last_use(restored[i]);
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      ValueId& output = outputs[o];
      if (output == kNoValue) continue;
      if (!needed[output]) {
        output = kNoValue;
      } else {
        last_use(output);
      }
    }
    for_each_argument(tape, op, [&](ValueId value, const Slot&) { last_use(value); });
    op.releases.end = static_cast<uint32_t>(releases.size());
  }
  const bool costs = !tape.costs.ops.empty();
  if (costs) tape.costs.ops.resize(ops.size());
  std::vector<uint32_t>& origins = tape.origins.own();
  origins.reserve(kept);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!keep[i]) continue;
    const size_t position = origins.size();
    if (costs) tape.costs.ops[position] = tape.costs.ops[i];
    ops[position] = ops[i];
    origins.push_back(static_cast<uint32_t>(i));
  }
  ops.resize(kept);
  if (costs) tape.costs.ops.resize(kept);
  // What only dropped ops read need not be held.
  std::erase_if(tape.externals.own(),
                [&](const External& external) { return !needed[external.value]; });
}

std::string Tape::describe() const {
  std::string text;
  size_t restore = 0;
  for (const Op& op : ops) {
    const auto names = [&](const std::string& separator, std::vector<ValueId> values) {
      std::string list;
      for (const ValueId value : values) {
        list += (list.empty() ? "" : separator) + "%" + std::to_string(value);
      }
      return list;
    };
    if (op.facts == nullptr) {
      text += "restore %" + std::to_string(restores[restore++].first) + "\n";
      continue;
    }
    std::vector<ValueId> results;
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      if (outputs[o] != kNoValue) results.push_back(outputs[o]);
    }
    std::vector<ValueId> read;
    for_each_argument(*this, op, [&](ValueId value, const Slot&) { read.push_back(value); });
    const c10::OperatorName& name = op.facts->handle.operator_name();
    text += names(", ", results) + (results.empty() ? "" : " = ") + name.name +
            (name.overload_name.empty() ? "" : "." + name.overload_name) + "(" + names(", ", read) +
            ")\n";
  }
  return text;
}

}  // namespace infinitybatch::tape
