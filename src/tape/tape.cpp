#include <infinitybatch/tape/tape.hpp>

#include <infinitybatch/tape/arguments.hpp>

#include <algorithm>

namespace infinitybatch::tape {
void trim(Tape& tape) {
  std::vector<bool> needed(tape.value_count, false);
  for (const ValueId value : tape.result_values) {
    if (value != kNoValue) needed[value] = true;
  }
  std::vector<bool> keep(tape.ops.size(), false);
  size_t restore = tape.restores.size();
  std::vector<ValueId> restored(tape.ops.size(), kNoValue);
  for (size_t i = tape.ops.size(); i-- > 0;) {
    const Op& op = tape.ops[i];
    if (op.facts == nullptr) {
      restored[i] = tape.restores[--restore].first;
      keep[i] = true;
      needed[restored[i]] = true;
      continue;
    }
    if (op.aside) continue;
    keep[i] = op.facts->writes || op.facts->draws;
    for (uint32_t o = op.outputs.begin; o < op.outputs.end && !keep[i]; ++o) {
      keep[i] = tape.outputs[o] != kNoValue && needed[tape.outputs[o]];
    }
    if (!keep[i]) continue;
    for_each_argument(tape, op, [&](ValueId value, const Slot&) { needed[value] = true; });
  }

  std::vector<Op> ops;
  std::vector<bool> released(tape.value_count, false);
  for (const ValueId value : tape.result_values) {
    if (value != kNoValue) released[value] = true;  // handed to the caller instead
  }
  for (const External& external : tape.externals) {
    if (external.before.defined()) released[external.value] = true;  // its end may be asked for
  }
  std::vector<ValueId> last;  // of each op those that it uses last, from the last op on
  std::vector<Range> releases(tape.ops.size());
  for (size_t i = tape.ops.size(); i-- > 0;) {
    if (!keep[i]) continue;
    const Op& op = tape.ops[i];
    const auto last_use = [&](ValueId value) {
      if (released[value]) return;
      released[value] = true;
      last.push_back(value);
    };
    releases[i].begin = static_cast<uint32_t>(last.size());
    if (restored[i] != kNoValue) last_use(restored[i]);
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      ValueId& output = tape.outputs[o];
      if (output == kNoValue) continue;
      if (!needed[output]) {
        output = kNoValue;
      } else {
        last_use(output);
      }
    }
    for_each_argument(tape, op, [&](ValueId value, const Slot&) { last_use(value); });
    releases[i].end = static_cast<uint32_t>(last.size());
  }
  std::vector<OpCost> costs;
  for (size_t i = 0; i < tape.ops.size(); ++i) {
    if (!keep[i]) continue;
    tape.origins.push_back(static_cast<uint32_t>(i));
    if (!tape.costs.ops.empty()) {
      costs.push_back(i < tape.costs.ops.size() ? tape.costs.ops[i] : OpCost());
    }
    Op op = tape.ops[i];
    op.releases.begin = static_cast<uint32_t>(tape.releases.size());
    tape.releases.insert(tape.releases.end(), last.begin() + releases[i].begin,
                         last.begin() + releases[i].end);
    op.releases.end = static_cast<uint32_t>(tape.releases.size());
    ops.push_back(op);
  }
  tape.ops = std::move(ops);
  tape.costs.ops = std::move(costs);
  // What only dropped ops read need not be held.
  std::erase_if(tape.externals, [&](const External& external) { return !needed[external.value]; });
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
