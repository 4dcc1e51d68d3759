#include "left_places.hpp"

#include "held.hpp"
#include "module_attributes.hpp"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string>
#include <utility>

namespace infinitybatch::python {
namespace {

constexpr Py_ssize_t kMostItems = 1024;  // a tokenizer's words, a history of the whole training
constexpr int kDeepest = 2;

bool holds_hooks(PyObject* name) {
  static const std::array<PyObject*, 2> kNames{interned("_forward_hooks"),
                                               interned("_forward_pre_hooks")};
  return is_one_of(name, kNames);
}

template <typename Do>
void undisturbed(Do what) {
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_error;
  what();
}

class LeftWalk {
 public:
  void module(PyObject* module, const std::string& prefix) {
    if (!seen_.insert(module).second) return;
    auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) return PyErr_Clear();
    if (!PyDict_CheckExact(attributes.ptr())) return;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &key, &value) != 0;) {
      if (PyDict_Check(value)) {
        if (PyDict_GET_SIZE(value) == 0 || is_listed(key)) continue;
        if (holds_hooks(key)) {
          hooks(value, prefix);
          continue;
        }
      }
      item(attributes.ptr(), key, value, prefix, 0);
    }
    PyObject* children = PyDict_GetItemWithError(attributes.ptr(), modules_name());
    if (children == nullptr || !PyDict_Check(children)) return;
    for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &value) != 0;) {
      if (value != Py_None) this->module(value, prefix + text(key) + ".");
    }
  }

  std::vector<LeftPlace> places() && { return std::move(places_); }

 private:
  static std::string text(PyObject* key) {
    return PyUnicode_Check(key) ? py::handle(key).cast<std::string>()
                                : py::repr(key).cast<std::string>();
  }

  void hooks(PyObject* hooks, const std::string& prefix) {
    PyObject* key = nullptr;
    PyObject* hook = nullptr;
    const std::string owner = prefix.empty() ? "the model" : prefix.substr(0, prefix.size() - 1);
    for (Py_ssize_t at = 0; PyDict_Next(hooks, &at, &key, &hook) != 0;) {
      function(hook, "a hook of " + owner);
    }
  }

  /// What a function holds, and what it names of its globals.
  void function(PyObject* value, const std::string& name) {
    if (PyMethod_Check(value)) {
      PyObject* self = PyMethod_GET_SELF(value);
      if (Py_TYPE(self)->tp_dictoffset != 0 && seen_.insert(self).second) attributes(self, name);
      value = PyMethod_GET_FUNCTION(value);
    }
    if (!PyFunction_Check(value) || !seen_.insert(value).second) return;
    auto* const code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(value));
    PyObject* closure = PyFunction_GET_CLOSURE(value);
    const auto free = py::reinterpret_steal<py::object>(PyCode_GetFreevars(code));
    for (Py_ssize_t i = 0; closure != nullptr && i < PyTuple_GET_SIZE(closure); ++i) {
      PyObject* cell = PyTuple_GET_ITEM(closure, i);
      PyObject* held = PyCell_Check(cell) ? PyCell_GET(cell) : nullptr;
      if (held == nullptr) continue;
      const std::string place = name + ", " + text(PyTuple_GET_ITEM(free.ptr(), i));
      if (is_tensor(held)) {
        single(cell, nullptr, held, place);
      } else {
        contents(held, place, 0);
      }
    }
    PyObject* globals = PyFunction_GET_GLOBALS(value);
    PyObject* names = code->co_names;
    for (Py_ssize_t i = 0; PyDict_CheckExact(globals) && i < PyTuple_GET_SIZE(names); ++i) {
      PyObject* key = PyTuple_GET_ITEM(names, i);
      PyObject* found = PyDict_GetItemWithError(globals, key);
      if (found != nullptr) item(globals, key, found, name + ", ", 0);
    }
  }

  void attributes(PyObject* object, const std::string& name) {
    auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!own) return PyErr_Clear();
    if (!PyDict_CheckExact(own.ptr()) || PyDict_Contains(own.ptr(), modules_name()) == 1) return;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(own.ptr(), &at, &key, &value) != 0;) {
      item(own.ptr(), key, value, name + ", ", 0);
    }
  }

  /// `value`, which lies in a dict under `key`.
  void item(PyObject* dict, PyObject* key, PyObject* value, const std::string& prefix, int depth) {
    if (is_tensor(value)) {
      single(dict, key, value, prefix + text(key));
    } else if (PyList_CheckExact(value) || PyDict_CheckExact(value)) {
      contents(value, prefix + text(key), depth);
    }
  }

  void contents(PyObject* value, const std::string& name, int depth) {
    if (depth == kDeepest) return;
    if (PyList_CheckExact(value) && PyList_GET_SIZE(value) <= kMostItems) {
      if (seen_.insert(value).second) list(value, name);
    } else if (PyDict_CheckExact(value) && PyDict_GET_SIZE(value) <= kMostItems) {
      if (!seen_.insert(value).second) return;
      PyObject* key = nullptr;
      PyObject* held = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &held) != 0;) {
        if (is_tensor(held)) {
          single(value, key, held, name + "[" + py::repr(key).cast<std::string>() + "]");
        } else if (PyList_CheckExact(held) || PyDict_CheckExact(held)) {
          contents(held, name + "[" + py::repr(key).cast<std::string>() + "]", depth + 1);
        }
      }
    }
  }

  /// \param key null where `owner` is a cell
  void single(PyObject* owner, PyObject* key, PyObject* value, const std::string& name) {
    const Held held(py::reinterpret_borrow<py::object>(owner));
    const Held at = key != nullptr ? Held(py::reinterpret_borrow<py::object>(key)) : Held();
    places_.push_back({name,
                       false,
                       {THPVariable_Unpack(value)},
                       [held, at, cell = key == nullptr](size_t, const at::Tensor& tensor) {
                         undisturbed([&] {
                           const py::object made = py::cast(tensor);
                           raise_if(cell ? PyCell_Set(held.get(), made.ptr())
                                         : PyDict_SetItem(held.get(), at.get(), made.ptr()));
                         });
                       },
                       {}});
  }

  void list(PyObject* value, const std::string& name) {
    LeftPlace place;
    place.name = name;
    place.list = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      place.tensors.push_back(tensor_or_nothing(PyList_GET_ITEM(value, i)));
    }
    const Held held(py::reinterpret_borrow<py::object>(value));
    place.put = [held](size_t index, const at::Tensor& tensor) {
      undisturbed([&] {
        raise_if(PyList_SetItem(held.get(), static_cast<Py_ssize_t>(index),
                                py::cast(tensor).release().ptr()));
      });
    };
    place.erase = [held](const std::vector<size_t>& indices) {
      undisturbed([&] {
        for (size_t i = indices.size(); i-- > 0;) {
          const auto at = static_cast<Py_ssize_t>(indices[i]);
          raise_if(PyList_SetSlice(held.get(), at, at + 1, nullptr));
        }
      });
    };
    places_.push_back(std::move(place));
  }

  std::vector<LeftPlace> places_;
  ska::flat_hash_set<PyObject*> seen_;
};

}  // namespace

std::vector<LeftPlace> left_places(py::handle model) {
  LeftWalk walk;
  walk.module(model.ptr(), "");
  return std::move(walk).places();
}

}  // namespace infinitybatch::python
