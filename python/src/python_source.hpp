#pragma once

#include "held.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/step/batch_dim.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

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

/// Inputs and targets of one logical batch.
struct Sides {
  BatchSource inputs;
  BatchSource targets;
};
/// \param batch_dim the option: along which dimension samples lie in what is not marked
/// \throws BatchError where inputs have no tensor, or where it is not clear how to split one
/// \param loss a coupled one sees targets whole, which need no rows then
Sides to_sides(py::handle inputs, py::handle targets, const std::optional<BatchDim>& batch_dim,
               const Loss& loss);

}  // namespace infinitybatch::python
