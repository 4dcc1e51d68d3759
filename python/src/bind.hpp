#pragma once

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

// One function for each concept; module.cpp calls them in this order.
void bind_errors(pybind11::module_& module);
void bind_batch(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_loss(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_tape(pybind11::module_& module);
void bind_virtual_batch(pybind11::module_& module);
void register_random_sources();

}  // namespace infinitybatch::python
