#pragma once

#include "held.hpp"

#include <functional>

namespace infinitybatch::python {

/// Saves the state of `numpy`'s global generator (the module numpy.random) and returns what puts it
/// back. The GIL is held. Where that generator is the MT19937 that NumPy starts with this costs a
/// fraction of get_state(); otherwise it is get_state().
std::function<void()> save_numpy_random(const py::object& numpy_random);

}  // namespace infinitybatch::python
