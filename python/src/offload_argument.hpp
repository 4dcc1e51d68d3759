#pragma once

#include <infinitybatch/step/virtual_batch.hpp>

#include <pybind11/pybind11.h>

#include <string>

namespace infinitybatch::python {

/// Offload as Python's users write it; names are checked in Python.
/// \param when "needed", "always" or "never"
/// \throws InvalidType, InvalidArgument for a host budget that is none
Offload to_offload(const std::string& when, pybind11::handle host_budget, bool disk,
                   std::string directory, double host_bandwidth);

}  // namespace infinitybatch::python
