#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>

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

/// By identity first. The interpreter interns the names of attributes, but for those of an object
/// that comes out of a pickle.
template <typename Names>
bool is_one_of(PyObject* name, const Names& names) {
  return std::any_of(names.begin(), names.end(), [name](PyObject* known) {
    return name == known || PyUnicode_Compare(name, known) == 0;
  });
}

/// Whether an attribute's value is listed elsewhere (parameters, buffers), or holds modules.
inline bool is_listed(PyObject* name) {
  static const std::array<PyObject*, 3> kNames{interned("_parameters"), interned("_buffers"),
                                               modules_name()};
  return is_one_of(name, kNames);
}

/// What functions of Python's C interface return where they failed is an exception here.
inline void raise_if(int result) {
  if (result != 0) throw py::error_already_set();
}

/// The same of what they return anew.
inline py::object owned(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

inline bool is_number_or_text(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

inline bool is_empty(PyObject* value) {
  return (PyDict_Check(value) && PyDict_GET_SIZE(value) == 0) ||
         (Py_TYPE(value) == &PySet_Type && PySet_GET_SIZE(value) == 0);
}

inline std::string repr_of(PyObject* value) {
  return value == nullptr ? std::string() : py::repr(value).cast<std::string>();
}

}  // namespace infinitybatch::python
