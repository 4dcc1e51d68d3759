// Python's and NumPy's global random state, for RngSnapshot.
#include "bind.hpp"
#include "held.hpp"

#include <infinitybatch/core/rng.hpp>

#include <functional>

namespace infinitybatch::python {
namespace {

/// Saves with `module.getter(*arguments)`, restores with `module.setter(state)`. Does nothing while
/// nobody has imported the module.
std::function<void()> save(const char* module, const char* getter, const char* setter,
                           const py::dict& arguments) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains(module)) return [] {};
  const py::object source = modules[module];
  const Held state(source.attr(getter)(**arguments));
  const Held restore(source.attr(setter));
  return [state, restore] {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;  // restoring may happen while an exception is on its way
    restore.handle()(state.handle());
  };
}

}  // namespace

void register_random_sources() {
  register_random_source([] {
    const py::gil_scoped_acquire gil;
    return save("random", "getstate", "setstate", py::dict());
  });
  register_random_source([] {
    const py::gil_scoped_acquire gil;
    return save("numpy.random", "get_state", "set_state", py::dict(py::arg("legacy") = false));
  });
}

}  // namespace infinitybatch::python
