#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace infinitybatch::python {

namespace py = pybind11;

/// The interpreter interns the names of attributes, so that addresses tell them apart.
inline PyObject* interned(const char* name) {
  PyObject* made = PyUnicode_InternFromString(name);
  if (made == nullptr) throw py::error_already_set();
  return made;  // for good
}

/// Of a module's attributes, one that is a plain dict (`_modules`). Borrowed; null where it is
/// none.
inline PyObject* dict_in(PyObject* attributes, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(attributes, name);
  return found != nullptr && PyDict_CheckExact(found) ? found : nullptr;
}

/// By its type: `isinstance` asks metaclasses, which costs a hundred times as much in each step.
inline bool is_tensor(PyObject* value) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

inline at::Tensor tensor_or_nothing(PyObject* object) {
  return object != nullptr && THPVariable_Check(object) ? THPVariable_Unpack(object) : at::Tensor();
}

inline PyObject* modules_name() {
  static PyObject* const name = interned("_modules");
  return name;
}

}  // namespace infinitybatch::python
