#pragma once

#include <infinitybatch/step/virtual_batch.hpp>

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// \param offload an infinitybatch.Offload, which has checked its values but the host budget
/// \throws InvalidType, InvalidArgument for a host budget that is none
Offload to_offload(pybind11::handle offload);

}  // namespace infinitybatch::python
