#include "module_walk.hpp"

#include "module_attributes.hpp"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace infinitybatch::python {
namespace {

constexpr Py_ssize_t kMostItems = 16;  // of a container: a tokenizer's words are no state
constexpr int kDeepest = 2;

/// Its value is listed, or holds modules. The interpreter interns the names of attributes, but for
/// those of an object that comes out of a pickle.
bool is_listed(PyObject* name) {
  static const std::array<PyObject*, 3> kNames{interned("_parameters"), interned("_buffers"),
                                               modules_name()};
  return std::any_of(kNames.begin(), kNames.end(), [name](PyObject* known) {
    return name == known || PyUnicode_Compare(name, known) == 0;
  });
}

/// By its type: `isinstance` asks metaclasses, which costs a hundred times as much in each step.
bool is_tensor(PyObject* value) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool may_hold_tensors(PyObject* value) {
  return is_tensor(value) || PyTuple_Check(value) || PyList_CheckExact(value) ||
         PyDict_CheckExact(value);
}

bool is_number_or_text(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

/// What a forward may leave for the next: "initialised" flags and counters too.
bool is_state(PyObject* value) {
  return value != nullptr && (may_hold_tensors(value) || is_number_or_text(value));
}

/// Torch's own, which go with its hooks and with `train()`.
bool is_torchs(PyObject* name) {
  return PyUnicode_CompareWithASCIIString(name, "training") == 0 ||
         PyUnicode_CompareWithASCIIString(name, "_is_full_backward_hook") == 0;
}

/// The attributes of one module, as they were.
struct Attributes {
  Held now;     // the module's dict itself
  Held before;  // a copy
};

void put_back(const Attributes& attributes) {
  PyObject* now = attributes.now.get();
  PyObject* before = attributes.before.get();
  std::vector<py::object> changed;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(now, &at, &key, &value) != 0;) {
    PyObject* old = PyDict_GetItemWithError(before, key);
    if (old == value || is_torchs(key)) continue;
    if (is_state(value) || is_state(old))
      changed.push_back(py::reinterpret_borrow<py::object>(key));
  }
  for (const py::object& name : changed) {
    PyObject* old = PyDict_GetItemWithError(before, name.ptr());
    const int failed =
        old == nullptr ? PyDict_DelItem(now, name.ptr()) : PyDict_SetItem(now, name.ptr(), old);
    if (failed != 0) throw py::error_already_set();
  }
}

class StateWalk {
 public:
  /// \param restorable what lies in the attributes is kept, to be put back
  explicit StateWalk(bool restorable) : restorable_(restorable) {}

  void module(PyObject* module, const std::string& prefix) {
    if (!modules_.insert(module).second) return;
    auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) return PyErr_Clear();
    if (!PyDict_CheckExact(attributes.ptr())) return;
    PyObject* children = PyDict_GetItemWithError(attributes.ptr(), modules_name());
    if (children == nullptr || !PyDict_CheckExact(children)) return;
    if (restorable_) note(attributes);
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &key, &value) != 0;) {
      if (!may_hold_tensors(value) || is_listed(key)) continue;
      take(value, prefix + py::handle(key).cast<std::string>(), 0);
    }
    for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &value) != 0;) {
      if (value != Py_None) this->module(value, prefix + py::handle(key).cast<std::string>() + ".");
    }
  }

  std::vector<NamedParameter> tensors() && { return std::move(tensors_); }

  PlainState state() && {
    return {std::move(tensors_), [kept = std::move(kept_)] {
              const py::gil_scoped_acquire gil;
              const py::error_scope keep_error;
              for (const Attributes& attributes : kept) put_back(attributes);
            }};
  }

 private:
  void note(const py::object& attributes) {
    auto copy = py::reinterpret_steal<py::object>(PyDict_Copy(attributes.ptr()));
    if (!copy) throw py::error_already_set();
    kept_.push_back({Held(attributes), Held(std::move(copy))});
  }

  void take(PyObject* value, const std::string& name, int depth) {
    if (is_tensor(value)) {
      tensors_.push_back({name, THPVariable_Unpack(value)});
      return;
    }
    if (depth == kDeepest) return;
    const auto each = [&](PyObject* item, const std::string& key) {
      if (may_hold_tensors(item)) take(item, name + "[" + key + "]", depth + 1);
    };
    if (PyTuple_Check(value)) {
      const Py_ssize_t size = std::min(PyTuple_GET_SIZE(value), kMostItems);
      for (Py_ssize_t i = 0; i < size; ++i) each(PyTuple_GET_ITEM(value, i), std::to_string(i));
    } else if (PyList_CheckExact(value)) {
      const Py_ssize_t size = std::min(PyList_GET_SIZE(value), kMostItems);
      for (Py_ssize_t i = 0; i < size; ++i) each(PyList_GET_ITEM(value, i), std::to_string(i));
    } else if (PyDict_CheckExact(value)) {
      PyObject* key = nullptr;
      PyObject* item = nullptr;
      Py_ssize_t count = 0;
      for (Py_ssize_t at = 0; count < kMostItems && PyDict_Next(value, &at, &key, &item) != 0;) {
        ++count;
        each(item, py::repr(key).cast<std::string>());
      }
    }
  }

  bool restorable_;
  std::vector<NamedParameter> tensors_;
  std::vector<Attributes> kept_;
  ska::flat_hash_set<PyObject*> modules_;
};

}  // namespace

PlainState plain_state(py::handle model) {
  StateWalk walk(/*restorable=*/true);
  walk.module(model.ptr(), "");
  return std::move(walk).state();
}

std::vector<NamedParameter> plain_tensors(py::handle model) {
  StateWalk walk(/*restorable=*/false);
  walk.module(model.ptr(), "");
  return std::move(walk).tensors();
}

}  // namespace infinitybatch::python
