#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace infinitybatch::python {

/// What `infinitybatch.shared(x)` and `infinitybatch.batch_dim(x, dim)` return: a part of a batch
/// and the dimension along which it is split.
struct [[gnu::visibility("hidden")]] Marked {  // as pybind11 is
  pybind11::object value;
  int64_t dim = 0;

  /// Cheaper than py::isinstance, for it is asked of every leaf that is no tensor.
  static bool check(pybind11::handle object) {
    return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(type.ptr());
  }
  static pybind11::handle type;
};

}  // namespace infinitybatch::python
