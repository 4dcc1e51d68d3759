#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace infinitybatch::python {

/// An object by its value: numbers, text, tensors' bits, containers and attributes, four levels
/// deep. Two that forward left are the same state where the texts are equal. The GIL is held.
std::string description_of(PyObject* value);

}  // namespace infinitybatch::python
