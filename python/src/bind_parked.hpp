#pragma once

#include <pybind11/pybind11.h>

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

}  // namespace infinitybatch::python
