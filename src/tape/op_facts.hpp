#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <vector>

namespace infinitybatch::tape {

/// What the schema of an operator says, read once.
struct OpFacts {
  explicit OpFacts(c10::OperatorHandle op) : handle(op) {}

  c10::OperatorHandle handle;
  size_t argument_count = 0;
  std::vector<bool> written;     ///< for each argument: whether the op changes it
  std::vector<bool> viewed;      ///< for each argument: whether an output may be a view of it
  bool writes = false;           ///< any of them
  bool writes_metadata = false;  ///< it changes shape or history alone: `detach_`, `t_`
  bool draws = false;            ///< may draw random numbers
  bool leaves_raw = false;       ///< its output is uninitialised memory: the `empty` family
  bool reads_values = false;     ///< hands tensor values to the host: item, nonzero, equal
  bool casts = false;            ///< converts to another type, as autocast does with weights
  bool scales_rows = false;      ///< of a weight, those that it looks up: `embedding_renorm_`
  bool looks_up = false;         ///< reads rows of its first argument that the second one names
  bool forward_ad = false;       ///< forward-mode gradients
  size_t return_count = 0;

  const std::string& name() const { return handle.operator_name().name; }
};

/// The facts of the op that is being observed; null where it is no registered operator (an
/// `autograd.Function`, a compiled region). They live as long as the process.
const OpFacts* facts_of(const at::RecordFunction& op);

}  // namespace infinitybatch::tape
