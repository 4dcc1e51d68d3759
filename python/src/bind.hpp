#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace infinitybatch::python {

// One function for each concept; module.cpp calls them in this order.
void bind_errors(pybind11::module_& module);
void bind_batch(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_loss(pybind11::module_& module);
void bind_contrastive(pybind11::module_& module);
void bind_coupled(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_tape(pybind11::module_& module);
void bind_bench(pybind11::module_& module);
void bind_verify(pybind11::module_& module);
void bind_step_report(pybind11::module_& module);
void bind_virtual_batch(pybind11::module_& module);
void bind_trainer(pybind11::module_& module);
void bind_evaluation(pybind11::module_& module);
void bind_noise_scale(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_wrap(pybind11::module_& module);
void bind_random(pybind11::module_& module);
void register_random_sources();
void register_wrapped_tensors();

/// Throws an error of this library as the Python exception that stands for it, for code that goes
/// through torch's own bindings, which do not know it. Returns where `error` is none of ours.
void throw_as_python(const std::exception_ptr& error);

}  // namespace infinitybatch::python
