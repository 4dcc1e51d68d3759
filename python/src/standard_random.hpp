#pragma once

#include "held.hpp"

#include <functional>

namespace infinitybatch::python {

/// Saves the state of Python's global generator (the module random) and returns what puts it back.
/// The GIL is held. Where that generator is the one that the module made this reads its memory, a
/// fraction of the cost of getstate(); otherwise it is getstate().
std::function<void()> save_standard_random(const py::object& random);

}  // namespace infinitybatch::python
