// Python's and NumPy's global random state, for RngSnapshot.
#include "bind.hpp"
#include "held.hpp"
#include "numpy_random.hpp"
#include "standard_random.hpp"

#include <infinitybatch/core/rng.hpp>

#include <functional>

namespace infinitybatch::python {
namespace {

/// The module where somebody has imported it: nobody else can have drawn from it.
py::object imported(const char* name) {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* found = PyDict_GetItemString(modules, name);
  return py::reinterpret_borrow<py::object>(found != nullptr ? found : Py_None);
}

/// A source that saves with `save(module)`.
template <typename Save>
void register_module(const char* name, Save save) {
  register_random_source([name, save]() -> std::function<void()> {
    const py::gil_scoped_acquire gil;
    const py::object module = imported(name);
    if (module.is_none()) return [] {};
    return [restore = save(module)] {
      const py::gil_scoped_acquire gil;
      const py::error_scope keep_error;  // restoring may happen while an exception is on its way
      restore();
    };
  });
}

}  // namespace

void register_random_sources() {
  register_module("random", &save_standard_random);
  register_module("numpy.random", &save_numpy_random);
}

}  // namespace infinitybatch::python
