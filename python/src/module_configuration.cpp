#include "module_attributes.hpp"
#include "module_walk.hpp"

#include <c10/util/flat_hash_map.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>

namespace infinitybatch::python {
namespace {

constexpr int kDeepestRead = 2;

class Hashing {
 public:
  void module(PyObject* module) {
    if (!modules_.insert(module).second) return;
    mix(reinterpret_cast<uintptr_t>(module));
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) return PyErr_Clear();
    if (!PyDict_CheckExact(attributes.ptr())) return;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &key, &value) != 0;) {
      setting(value, 0);
    }
    static PyObject* const hooks_name = interned("_forward_hooks");
    static PyObject* const pre_hooks_name = interned("_forward_pre_hooks");
    for (PyObject* name : {hooks_name, pre_hooks_name}) {
      if (PyObject* hooks = PyDict_GetItemWithError(attributes.ptr(), name)) keys(hooks);
    }
    PyObject* children = PyDict_GetItemWithError(attributes.ptr(), modules_name());
    if (children == nullptr || !PyDict_Check(children)) return;  // ordered, in old pickles
    for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &value) != 0;) {
      if (value != Py_None) this->module(value);
    }
  }

  uint64_t value() const noexcept { return value_; }

 private:
  void mix(uint64_t number) { value_ = c10::hash_combine(value_, number); }

  void keys(PyObject* dict) {
    if (!PyDict_Check(dict)) return;  // an OrderedDict mostly
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) setting(key, 0);
  }

  /// Each kind of value begins with a number of its own: 1, 1.0 and True have one hash in Python.
  void setting(PyObject* value, int depth) {
    if (value == Py_None || PyBool_Check(value)) {
      mix(reinterpret_cast<uintptr_t>(value));
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      mix(1);
      mix(static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
    } else if (PyFloat_CheckExact(value)) {
      mix(2);
      mix(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    } else if (PyUnicode_CheckExact(value)) {
      mix(3);
      mix(static_cast<uint64_t>(PyObject_Hash(value)));
    } else if (PyTuple_CheckExact(value)) {
      mix(4);
      if (depth == kDeepestRead) return;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        setting(PyTuple_GET_ITEM(value, i), depth + 1);
      }
    } else if (PyFunction_Check(value) || PyCFunction_Check(value)) {
      mix(reinterpret_cast<uintptr_t>(value));
    }
  }

  ska::flat_hash_set<PyObject*> modules_;
  uint64_t value_ = 0;
};

}  // namespace

uint64_t configuration_of(py::handle model) {
  Hashing hashing;
  hashing.module(model.ptr());
  return hashing.value();
}

}  // namespace infinitybatch::python
