#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <string>
#include <vector>

namespace infinitybatch {

/// For tests: what steps and calls of this process run, in order, whichever way they go. Costs one
/// read of a flag while nobody asks.
class ExecutionLog {
 public:
  /// Begins an empty log, or ends it.
  static void keep(bool on);
  /// What ran since the last call, such as "record 0:4" or "resume 0:4 segment 1".
  static std::vector<std::string> take();

  static void note(const Instruction& instruction, Rows rows);
};

}  // namespace infinitybatch
