#pragma once

#include "held.hpp"

#include <infinitybatch/step/options.hpp>

#include <vector>

namespace infinitybatch::python {

/// Options as Python's keyword arguments give them, whose values infinitybatch._options has checked
/// as far as Python can. Those left out are as in C++; `interrupt` is Ctrl-C.
/// \param held takes the callbacks, for the garbage collector
/// \throws InvalidType for a name that is none, InvalidArgument and InvalidType for a budget that
/// is
///         none
Options to_options(const py::dict& given, std::vector<Held>& held);

/// Every option that Python knows, with its default, for tests.
py::dict option_defaults();

}  // namespace infinitybatch::python
