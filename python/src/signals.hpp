#pragma once

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// Ctrl-C as Python's exception, between two micro-batches.
inline void check_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace infinitybatch::python
