#pragma once

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// infinitybatch._tree, kept for good.
inline pybind11::handle tree_module() {
  static const pybind11::handle module = pybind11::module_::import("infinitybatch._tree").release();
  return module;
}

}  // namespace infinitybatch::python
