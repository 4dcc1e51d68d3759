// Python's and NumPy's global random state, for RngSnapshot.
#include "bind.hpp"
#include "core/rng.hpp"
#include "held.hpp"
#include "numpy_random.hpp"
#include "standard_random.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch::python {
namespace {

/// The module, None without NumPy. NumPy imports its generator when somebody asks for it first: a
/// forward may, or another thread meanwhile, and what it draws has to be drawn again. So it is
/// imported here, in front of them, and waited for where another thread is importing it.
py::object imported(const std::string& name) {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  const std::string package = name.substr(0, name.find('.'));
  PyObject* found = PyDict_GetItemString(modules, package.c_str());
  if (found == nullptr || found == Py_None) return py::none();
  PyObject* module = PyImport_ImportModule(name.c_str());
  if (module != nullptr) return py::reinterpret_steal<py::object>(module);
  PyErr_Clear();  // an installation without it
  return py::none();
}

/// A source that saves with `save(module)`.
/// \param tell gives what changes whenever numbers are drawn
template <typename Save>
void register_module(const char* name, Save save, std::string (*tell)(const py::object& module)) {
  const auto saved = [name, save]() -> std::function<void()> {
    const py::gil_scoped_acquire gil;
    const py::object module = imported(name);
    if (module.is_none()) return [] {};
    return [restore = save(module)] {
      const py::gil_scoped_acquire gil;
      const py::error_scope keep_error;  // restoring may happen while an exception is on its way
      restore();
    };
  };
  register_random_source(saved, name, [name, tell]() -> std::string {
    const py::gil_scoped_acquire gil;
    const py::object module = imported(name);
    return module.is_none() ? "" : tell(module);
  });
}

std::string tell_standard(const py::object& random) {
  return std::to_string(py::hash(random.attr("getstate")()));
}

std::string tell_numpy(const py::object& numpy_random) {
  const py::object state = numpy_random.attr("get_state")(py::arg("legacy") = false);
  if (state["bit_generator"].cast<std::string>() != "MT19937") {
    return py::repr(state).cast<std::string>();
  }
  const auto key = state["state"]["key"].attr("tobytes")().cast<std::string>();
  const py::tuple beside =
      py::make_tuple(state["state"]["pos"], state["has_gauss"], state["gauss"]);
  return key + py::repr(beside).cast<std::string>();
}

}  // namespace

void register_random_sources() {
  register_module("random", &save_standard_random, &tell_standard);
  register_module("numpy.random", &save_numpy_random, &tell_numpy);
}

void bind_random(py::module_& module) {
  py::class_<RngSnapshot>(module, "RandomSnapshot")
      .def(py::init(&RngSnapshot::capture), py::arg("devices"))
      .def("restore", &RngSnapshot::restore);
}

}  // namespace infinitybatch::python
