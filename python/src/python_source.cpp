#include "python_source.hpp"

#include "core/kept_batch.hpp"
#include "hidden_rows.hpp"
#include "step/admission.hpp"
#include "step/mark_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <torch/csrc/utils/pybind.h>

namespace infinitybatch::python {
namespace {

Batch read_rows(const Held& rows, int64_t begin, int64_t end, const char* name,
                const std::optional<BatchDim>& batch_dim) {
  const py::gil_scoped_acquire gil;
  const py::object value = rows.handle()(begin, end);
  Batch batch = to_batch(value, Side::given, name);
  if (batch_dim) batch = mark_rows(std::move(batch), *batch_dim, name);
  const int64_t size = batch_size(batch, name);
  if (size != end - begin) {
    throw BatchError(std::string(name) + ": the BatchSource was asked for rows " +
                     std::to_string(begin) + " to " + std::to_string(end) + " and gave " +
                     std::to_string(size) + "; it must give end - begin");
  }
  return batch;
}

BatchSource from_python(const PythonSource& python, const char* name,
                        const std::optional<BatchDim>& batch_dim) {
  // Without it the planner would take sources of other shapes for this one.
  if (python.first_row->signature.empty()) {
    BatchSource first = BatchSource::from(read_rows(python.rows, 0, 1, name, batch_dim), name);
    python.first_row->signature = std::move(first.signature);
    python.first_row->dims = std::move(first.dims);
    python.first_row->arguments = std::move(first.arguments);
  }
  return {python.size,
          [rows = python.rows, name, batch_dim](int64_t begin, int64_t end) {
            return read_rows(rows, begin, end, name, batch_dim);
          },
          python.first_row->signature,
          python.first_row->dims,
          /*uniform=*/false,
          python.first_row->arguments};
}

/// One side of a step: a BatchSource, or anything that `to_batch` understands. A batch without any
/// tensor has the size of the other side, which is not known here.
struct StepSide {
  std::optional<BatchSource> source;
  Batch whole;    // where `source` is empty
  Extent extent;  // of what is given as tensors, with `batch_dim`

  bool has_rows() const { return source.has_value(); }
};

template <typename Mark>
StepSide to_step_side(py::handle value, const char* name, const std::optional<BatchDim>& batch_dim,
                      const Mark& mark, bool whole = false) {
  if (py::isinstance<PythonSource>(value)) {
    StepSide side{from_python(value.cast<const PythonSource&>(), name, batch_dim), Batch(), {}};
    side.extent.samples = side.source->size;
    return side;
  }
  Batch batch = to_batch(value, Side::given, name);
  if (batch.tensors().empty()) return {std::nullopt, std::move(batch), {}};
  if (batch_dim) batch = mark(std::move(batch));
  if (whole) return {targets_as_given(batch), Batch(), {}};
  BatchSource source = BatchSource::from(batch, name);
  refuse_hidden_rows(value, batch, source.size, name);
  return {std::move(source), Batch(), batch_dim ? extent_of(batch) : Extent()};
}

}  // namespace

Sides to_sides(py::handle inputs, py::handle targets, const std::optional<BatchDim>& batch_dim,
               const Loss& loss) {
  const bool whole = std::holds_alternative<CoupledLoss>(loss);
  StepSide left = to_step_side(inputs, "inputs", batch_dim, [&](Batch batch) {
    return mark_inputs(std::move(batch), *batch_dim);
  });
  StepSide right = to_step_side(
      targets, "targets", batch_dim,
      [&](Batch batch) { return mark_targets(std::move(batch), *batch_dim, left.extent, whole); },
      whole);
  if (whole && right.has_rows() && left.has_rows() && right.source->size != left.source->size) {
    static const py::handle module = py::module_::import("infinitybatch._rows").release();
    module.attr("refuse_lists_beside_targets")(inputs, targets);
  }
  if (!left.has_rows()) {
    refuse_hidden_rows(inputs, left.whole, /*samples=*/0, "inputs");
    batch_size(left.whole, "inputs");  // throws: there is no tensor
  }
  if (!right.has_rows()) {
    if (!whole) refuse_hidden_rows(targets, right.whole, left.source->size, "targets");
    right.source = no_targets(right.whole, left.source->size);
  }
  return {std::move(*left.source), std::move(*right.source)};
}

}  // namespace infinitybatch::python
