#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace infinitybatch::python {

/// What reports say of copies of parked values.
template <typename Report, typename... Options>
void bind_parked(pybind11::class_<Report, Options...>& type) {
  type.def_readonly("parked_bytes", &Report::parked_bytes,
                    "Bytes that left the device for host or disk, each time counted.")
      .def_property_readonly(
          "parked_seconds_hidden", [](const Report& self) { return self.parked_seconds.hidden; },
          "Of copying parked values, out and back, behind compute.")
      .def_property_readonly(
          "parked_seconds_waited", [](const Report& self) { return self.parked_seconds.waited; },
          "Waiting for copies of parked values.");
}

/// What they say of graphs that wait away from the device.
/// \param of what they report on
template <typename Report, typename... Options>
void bind_graph_bytes(pybind11::class_<Report, Options...>& type, const std::string& of) {
  const std::string left = "What of graphs left the device in the last " + of + ".";
  type.def_property_readonly(
          "parked_graph_bytes", [](const Report& self) { return self.graph_bytes.parked; },
          left.c_str())
      .def_property_readonly(
          "stayed_graph_bytes", [](const Report& self) { return self.graph_bytes.stayed; },
          "What of parked graphs did not: Python holds it as well, or it is foreign.");
}

}  // namespace infinitybatch::python
