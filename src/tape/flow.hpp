#pragma once

#include "tape/arguments.hpp"
#include "tape/tape.hpp"

#include <unordered_set>
#include <vector>

namespace infinitybatch::tape {

/// Which values come from the samples, op by op.
class Flow {
 public:
  /// Begins with the leaves of the inputs; shared ones hold no samples.
  Flow(const Tape& tape, const Batch& inputs);

  bool has(ValueId value) const {
    return values_[value] || memories_.count(tape_.memories[value]) != 0;
  }

  /// Whether the op is given such values.
  bool meets(const Op& op) const;
  /// What it makes of them. Call it for each op that has facts, in order.
  void pass(const Op& op);

 private:
  void mark(ValueId value);
  /// A view, or the tensor itself, of an argument that holds nothing of the samples: `a.expand_as`.
  bool is_clean_view(const Op& op, ValueId output) const;

  const Tape& tape_;
  std::vector<bool> values_;
  std::unordered_set<uint32_t> memories_;
};

/// Whether an argument says which rows an op takes or writes (`index_select`, `embedding`).
bool is_index(const Op& op, const Slot& slot);

/// For each op, whether one of these leaves of the result may come from it.
/// \param indices whether it counts to have decided which rows were taken
std::vector<bool> lead_to(const Tape& tape, const std::vector<bool>& outputs, bool indices = true);

}  // namespace infinitybatch::tape
