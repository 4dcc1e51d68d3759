#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

namespace infinitybatch::python {

/// A number that no other object of this process has had, as long as the object lives: an address
/// is given again once its object is gone. Nothing is kept alive for it. Nothing for objects that
/// nobody can refer to weakly (numbers, lists, dicts). The GIL is held.
std::optional<uint64_t> serial_of(PyObject* object);

}  // namespace infinitybatch::python
