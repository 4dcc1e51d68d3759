#include "bind.hpp"
#include "python_batch.hpp"
#include "tape/recorder.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

py::tuple record(const py::function& function, const py::tuple& inputs,
                 const std::vector<at::Tensor>& buffers) {
  const Batch given = to_batch(inputs, Side::returned, "inputs");
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : given.tensors()) devices.push_back(tensor.device());
  for (const at::Tensor& tensor : buffers) devices.push_back(tensor.device());
  tape::Recorder recorder(given, buffers, devices);
  const py::object returned = recorder.run([&] { return function(*inputs); });
  const Batch outputs = to_batch(returned, Side::returned, "outputs");
  return py::make_tuple(returned, recorder.finish(outputs));
}

}  // namespace

void bind_tape(py::module_& module) {
  py::module_ tape = module.def_submodule("tape");
  py::class_<tape::Tape>(tape, "Tape", R"(The ATen ops that one call of a function ran.

Replaying them gives the bits of the recording, with a graph of its own, without the function.)")
      .def_property_readonly(
          "opaque", [](const tape::Tape& tape) { return tape.opaque; },
          "Why the tape cannot be replayed; None where it can.")
      .def_property_readonly(
          "refusal", [](const tape::Tape& tape) { return tape.refusal; },
          "Why even running the function again would not be exact; None where it would.")
      .def_property_readonly(
          "host_read", [](const tape::Tape& tape) { return tape.host_read; },
          "The first op whose values reached the host; None without one.")
      .def("__len__", [](const tape::Tape& tape) { return tape.ops.size(); })
      .def("__str__", &tape::Tape::describe)
      .def(
          "replay",
          [](const tape::Tape& tape, const py::args& inputs) {
            const Batch given = to_batch(inputs, Side::returned, "inputs");
            Batch outputs;
            {
              const py::gil_scoped_release nogil;
              outputs = tape::replay(tape, given);
            }
            return to_python(outputs);
          },
          R"(Runs the ops again on the same inputs and returns what the function returned.

Raises Unsupported where the tape is opaque, StateError where a tensor that the function read has
been changed since.)");
  tape.def("record", &record, py::arg("function"), py::arg("inputs"),
           py::arg("buffers") = std::vector<at::Tensor>(),
           R"(Calls function(*inputs) and records it. Returns (what it returned, its Tape).

buffers: tensors that the function may write into.)");
}

}  // namespace infinitybatch::python
