#pragma once

#include <infinitybatch/step/left_place.hpp>

#include <pybind11/pybind11.h>

#include <vector>

namespace infinitybatch::python {

/// Where forward of `model`, a torch.nn.Module, may leave tensors: attributes of its modules, two
/// levels deep, and what their hooks hold in closures, or name of their module's globals. The GIL
/// is held.
std::vector<LeftPlace> left_places(pybind11::handle model);

}  // namespace infinitybatch::python
