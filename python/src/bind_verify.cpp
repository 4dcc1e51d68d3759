#include "bind.hpp"

#include <infinitybatch/step/verify.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <sstream>
#include <string>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

std::string describe(const Comparison& comparison) {
  std::ostringstream text;
  text << c10::toString(comparison.type) << ": ";
  const ParameterError* worst = comparison.worst();
  if (worst == nullptr) return text.str() + "nothing compared";
  text.precision(2);
  text << "worst error " << worst->error << " of " << worst->allowed << " in " << worst->name;
  return text.str();
}

}  // namespace

void bind_verify(py::module_& module) {
  py::class_<ParameterError>(
      module, "ParameterError",
      "How far one parameter's gradient, or one buffer, is from the native whole batch's.")
      .def_readonly("name", &ParameterError::name)
      .def_readonly("error", &ParameterError::error,
                    "Norm of the difference to native fp64, divided by native's norm.")
      .def_readonly("allowed", &ParameterError::allowed)
      .def("__repr__", [](const ParameterError& self) {
        return "<ParameterError " + self.name + ": " + std::to_string(self.error) + " of " +
               std::to_string(self.allowed) + ">";
      });
  py::class_<Comparison>(module, "Comparison", "Gradients in one precision.")
      .def_readonly("parameters", &Comparison::parameters)
      .def_readonly("buffers", &Comparison::buffers,
                    "What the step left in buffers, a ParameterError each; in fp64 alone.")
      .def_property_readonly("type",
                             [](const Comparison& self) { return c10::toString(self.type); })
      .def_property_readonly("exact", &Comparison::exact)
      .def_property_readonly("worst",
                             [](const Comparison& self) {
                               const ParameterError* worst = self.worst();
                               return worst == nullptr ? std::nullopt : std::optional(*worst);
                             })
      .def("__repr__", [](const Comparison& self) {
        return "<Comparison: " + std::string(self.exact() ? "exact" : "not exact") + ", " +
               describe(self) + ">";
      });
  py::class_<VerifyReport>(module, "VerifyReport", "What verify found.")
      .def_property_readonly("exact", &VerifyReport::exact, "Whether every error is allowed.")
      .def_readonly("batch_size", &VerifyReport::batch_size)
      .def_readonly("rows", &VerifyReport::rows,
                    "Samples compared: fewer than all where native does not fit into memory.")
      .def_readonly("micro_batch_sizes", &VerifyReport::micro_batch_sizes)
      .def_readonly("strategy", &VerifyReport::strategy)
      .def_readonly("in_fp64", &VerifyReport::in_fp64, "A Comparison, or None; see why_no_fp64.")
      .def_readonly("why_no_fp64", &VerifyReport::why_no_fp64)
      .def_readonly("own", &VerifyReport::own, "The Comparison in the model's own precision.")
      .def_readonly("coupled_output", &VerifyReport::coupled_output,
                    "The first output in which one sample depends on another; None without one.")
      .def("explain", &VerifyReport::explain)
      .def("__str__", &VerifyReport::explain)
      .def("__repr__", [](const VerifyReport& self) {
        return std::string("<VerifyReport: ") + (self.exact() ? "exact" : "not exact") + ", " +
               std::to_string(self.rows) + " of " + std::to_string(self.batch_size) + " samples, " +
               self.strategy + ", " + describe(self.own) + ">";
      });
}

}  // namespace infinitybatch::python
