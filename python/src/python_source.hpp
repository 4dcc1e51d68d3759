#pragma once

#include "held.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/batch_source.hpp>

#include <memory>
#include <optional>
#include <string>

namespace infinitybatch::python {

/// `infinitybatch.BatchSource`.
struct PythonSource {
  int64_t size = 0;
  Held rows;                               // (begin, end) -> pytree
  std::shared_ptr<BatchSource> first_row;  // once it was read, for its signature
};

/// One side of a step: a BatchSource, or anything that `to_batch` understands. A batch without any
/// tensor has the size of the other side, which is not known here.
struct StepSide {
  std::optional<BatchSource> source;
  Batch whole;  // where `source` is empty

  bool has_rows() const { return source.has_value(); }
};
StepSide to_step_side(py::handle value, const char* name);

/// Inputs and targets of one logical batch.
struct Sides {
  BatchSource inputs;
  BatchSource targets;
};
/// \throws BatchError where inputs have no tensor; what `to_step_side` throws
Sides to_sides(py::handle inputs, py::handle targets);

}  // namespace infinitybatch::python
