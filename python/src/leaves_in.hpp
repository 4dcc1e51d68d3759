#pragma once

#include "execute/plain_state.hpp"

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace infinitybatch::python {

/// Leaves that get a gradient, wherever an object holds them: in containers, in modules and their
/// children, in attributes. The first some thousand objects are looked at; null holds none.
std::vector<PlainLeaf> leaves_in(PyObject* value);

}  // namespace infinitybatch::python
