#pragma once

#include <infinitybatch/memory/budget.hpp>

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// A budget as Python's users write it: int, float or str. \param name for messages
/// \throws InvalidType for anything else; InvalidArgument as Budget's constructors
memory::Budget to_budget(pybind11::handle value, const char* name);

}  // namespace infinitybatch::python
