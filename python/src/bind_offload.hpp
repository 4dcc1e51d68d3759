#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace infinitybatch::python {

/// What reports say of copies of offloaded values.
template <typename Report, typename... Options>
void bind_offload(pybind11::class_<Report, Options...>& type) {
  type.def_readonly("offloaded_bytes", &Report::offloaded_bytes,
                    "Bytes that left the device for host or disk, each time counted.")
      .def_property_readonly(
          "offload_seconds_hidden", [](const Report& self) { return self.offload_seconds.hidden; },
          "Of copying offloaded values, out and back, behind compute.")
      .def_property_readonly(
          "offload_seconds_waited", [](const Report& self) { return self.offload_seconds.waited; },
          "Waiting for copies of offloaded values.");
}

/// What they say of graphs that wait away from the device.
/// \param of what they report on
template <typename Report, typename... Options>
void bind_graph_bytes(pybind11::class_<Report, Options...>& type, const std::string& of) {
  const std::string left = "What of graphs left the device in the last " + of + ".";
  type.def_property_readonly(
          "offloaded_graph_bytes", [](const Report& self) { return self.graph_bytes.offloaded; },
          left.c_str())
      .def_property_readonly(
          "stayed_graph_bytes", [](const Report& self) { return self.graph_bytes.stayed; },
          "What of offloaded graphs did not: Python holds it as well, or it is foreign.");
}

}  // namespace infinitybatch::python
