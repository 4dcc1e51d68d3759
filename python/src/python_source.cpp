#include "python_source.hpp"

#include "hidden_rows.hpp"

#include <infinitybatch/core/errors.hpp>

#include <torch/csrc/utils/pybind.h>

namespace infinitybatch::python {
namespace {

Batch read_rows(const Held& rows, int64_t begin, int64_t end, const char* name) {
  const py::gil_scoped_acquire gil;
  const py::object value = rows.handle()(begin, end);
  Batch batch = to_batch(value, Side::given, name);
  const int64_t size = batch_size(batch, name);
  if (size != end - begin) {
    throw BatchError(std::string(name) + ": the BatchSource was asked for rows " +
                     std::to_string(begin) + " to " + std::to_string(end) + " and gave " +
                     std::to_string(size) + "; it must give end - begin");
  }
  return batch;
}

BatchSource from_python(const PythonSource& python, const char* name) {
  // Without it the planner would take sources of other shapes for this one.
  if (python.first_row->signature.empty()) {
    BatchSource first = BatchSource::from(read_rows(python.rows, 0, 1, name), name);
    python.first_row->signature = std::move(first.signature);
    python.first_row->dims = std::move(first.dims);
    python.first_row->arguments = std::move(first.arguments);
  }
  return {python.size,
          [rows = python.rows, name](int64_t begin, int64_t end) {
            return read_rows(rows, begin, end, name);
          },
          python.first_row->signature,
          python.first_row->dims,
          /*uniform=*/false,
          python.first_row->arguments};
}

}  // namespace

StepSide to_step_side(py::handle value, const char* name) {
  if (py::isinstance<PythonSource>(value)) {
    return {from_python(value.cast<const PythonSource&>(), name), Batch()};
  }
  Batch batch = to_batch(value, Side::given, name);
  if (batch.tensors().empty()) return {std::nullopt, std::move(batch)};
  BatchSource source = BatchSource::from(batch, name);
  refuse_hidden_rows(value, batch, source.size, name);
  return {std::move(source), Batch()};
}

Sides to_sides(py::handle inputs, py::handle targets) {
  StepSide left = to_step_side(inputs, "inputs");
  StepSide right = to_step_side(targets, "targets");
  if (!left.has_rows()) {
    refuse_hidden_rows(inputs, left.whole, /*samples=*/0, "inputs");
    batch_size(left.whole, "inputs");  // throws: there is no tensor
  }
  if (!right.has_rows()) {
    refuse_hidden_rows(targets, right.whole, left.source->size, "targets");
    right.source =
        BatchSource{left.source->size, [whole = right.whole](int64_t, int64_t) { return whole; },
                    "none", Dims(), /*uniform=*/true};
  }
  return {std::move(*left.source), std::move(*right.source)};
}

}  // namespace infinitybatch::python
