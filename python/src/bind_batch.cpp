#include "bind.hpp"
#include "marked.hpp"
#include "plain_leaves.hpp"
#include "python_source.hpp"

#include <infinitybatch/core/errors.hpp>

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace infinitybatch::python {

namespace py = pybind11;

py::handle Marked::type;

namespace {

int64_t whole_number(const char* name, const py::object& value) {
  if (PyBool_Check(value.ptr()) != 0 || PyIndex_Check(value.ptr()) == 0) {
    throw InvalidType(std::string(name) + " must be a whole number, not " +
                      Py_TYPE(value.ptr())->tp_name);
  }
  const Py_ssize_t number = PyNumber_AsSsize_t(value.ptr(), PyExc_OverflowError);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw InvalidArgument(std::string(name) + " is a whole number of more than 64 bits");
  }
  return number;
}

PythonSource make_source(const py::object& given, const py::object& rows) {
  const int64_t size = whole_number("the size of a BatchSource", given);
  if (size < 1) {
    throw BatchError("a BatchSource of size " + std::to_string(size) +
                     " has nothing to split; give it one sample or more");
  }
  if (PyCallable_Check(rows.ptr()) == 0) {
    throw InvalidType(std::string("rows must be a callable (begin, end) -> pytree, not ") +
                      Py_TYPE(rows.ptr())->tp_name);
  }
  py::module_::import("infinitybatch._checks").attr("called_with")("rows", rows, "begin", "end");
  return {size, Held(rows), std::make_shared<BatchSource>()};
}

int64_t checked_dim(const py::object& given) {
  const int64_t dim = whole_number("batch_dim", given);
  if (dim < 0) {
    throw InvalidArgument("batch_dim is " + std::to_string(dim) +
                          "; count dimensions from the front, starting at 0");
  }
  return dim;
}

}  // namespace

void bind_batch(py::module_& module) {
  register_plain_leaves();
  py::class_<Marked> marked(module, "Marked", R"(A part of a batch and how it is split.

Made by `shared` and `batch_dim`.)");
  marked.def_readonly("value", &Marked::value)
      .def_property_readonly("dim", [](const Marked& self) { return self.dim; })
      .def("__repr__", [](const Marked& self) {
        const std::string value = py::repr(self.value);
        return self.dim == Leaf::kShared
                   ? "shared(" + value + ")"
                   : "batch_dim(" + value + ", " + std::to_string(self.dim) + ")";
      });
  Marked::type = py::handle(marked).inc_ref();

  module.def(
      "shared", [](py::object value) { return Marked{std::move(value), Leaf::kShared}; },
      py::arg("value"), R"(Marks a part of a batch that every micro-batch sees whole.

Args:
    value: a tensor or any nested structure of tensors, as it stands in inputs or targets.

Example:
    batch.backward({"ids": ids, "positions": ib.shared(positions)}, labels))");
  module.def(
      "batch_dim",
      [](py::object value, const py::object& dim) {
        return Marked{std::move(value), checked_dim(dim)};
      },
      py::arg("value"), py::arg("dim"),
      R"(Marks a part of a batch whose samples do not lie along dimension 0.

Args:
    value: a tensor or any nested structure of tensors, as it stands in inputs or targets.
    dim: the dimension that is split, counted from the front.

Raises:
    InvalidArgument: for a negative dimension.

Example:
    batch.backward(ib.batch_dim(sequence, 1), labels)  # (time, batch, features))");

  py::class_<PythonSource>(module, "BatchSource",
                           R"(A logical batch that need not exist as one tensor.

Args:
    size: the number of samples.
    rows: `rows(begin, end)` makes the samples from `begin` up to and without `end`: tensors, NumPy
        arrays or any nested structure of them. It may be asked several times for the same samples
        (denominators, restarts) and must give the same values each time: where a step needs
        inputs again, others are a BatchError.

Example:
    images = ib.BatchSource(1_000_000, lambda begin, end: read_images(begin, end)))")
      .def(py::init(&make_source), py::arg("size"), py::arg("rows"))
      .def_property_readonly("size", [](const PythonSource& self) { return self.size; })
      .def("__len__", [](const PythonSource& self) { return self.size; })
      .def(
          "rows",
          [](const PythonSource& self, int64_t begin, int64_t end) {
            return self.rows.handle()(begin, end);
          },
          py::arg("begin"), py::arg("end"))
      .def("__repr__", [](const PythonSource& self) {
        return "BatchSource(size=" + std::to_string(self.size) + ")";
      });
}

}  // namespace infinitybatch::python
