#include "plain_snapshot.hpp"

#include "module_attributes.hpp"
#include "plain_description.hpp"
#include "plain_iterators.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace infinitybatch::python {
namespace {

constexpr Py_ssize_t kMostKeptItems = 16384;  // of a container: a tokenizer's words are no state
constexpr Py_ssize_t kMostSeenItems = 1024;   // of these, what they hold
constexpr size_t kMostObjects = 100000;
constexpr int kDeepestKept = 5;

/// A class of the standard library, for good.
PyTypeObject* type_of(const char* module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(
      py::module_::import(module).attr(name).cast<py::object>().release().ptr());
}

bool is_set_or_deque(PyObject* value) {
  static PyTypeObject* const deque = type_of("collections", "deque");
  return Py_TYPE(value) == &PySet_Type || Py_TYPE(value) == deque;
}

bool is_partial(PyObject* value) {
  static PyTypeObject* const partial = type_of("functools", "partial");
  return Py_TYPE(value) == partial;
}

/// Classes of objects that other threads change, or that nobody would undo.
bool is_foreign(PyTypeObject* type) {
  static ska::flat_hash_map<PyTypeObject*, bool> verdicts;
  const auto [known, anew] = verdicts.emplace(type, false);
  if (!anew) return known->second;
  Py_INCREF(type);  // no other class is made at its address
  const auto module = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__module__"));
  if (!module) PyErr_Clear();
  if (!module || PyUnicode_Check(module.ptr()) == 0) return false;
  const auto name = module.cast<std::string>();
  constexpr std::array<std::string_view, 17> kFamilies{
      "lightning",       "pytorch_lightning", "accelerate", "threading",       "_thread",
      "queue",           "logging",           "asyncio",    "multiprocessing", "concurrent",
      "torch.optim",     "torch.utils.data",  "weakref",    "infinitybatch",   "torch._dynamo",
      "torch._inductor", "torch._functorch"};
  verdicts[type] = std::any_of(kFamilies.begin(), kFamilies.end(), [&](std::string_view family) {
    return name == family || (name.starts_with(family) && name[family.size()] == '.');
  });
  return verdicts[type];
}

/// Neither classes nor Python's own modules.
bool has_plain_attributes(PyObject* value) {
  return Py_TYPE(value)->tp_dictoffset != 0 && !PyType_Check(value) && !PyModule_Check(value) &&
         !PyFunction_Check(value) && !is_foreign(Py_TYPE(value));
}

/// Whether something in it may change: asked before its name is made.
bool may_change(PyObject* value) {
  if (PyFunction_Check(value)) return PyFunction_GetClosure(value) != nullptr;
  if (PyTuple_Check(value)) return PyTuple_GET_SIZE(value) != 0;
  return PyDict_Check(value) || PyList_Check(value) || PyMethod_Check(value) ||
         is_set_or_deque(value) || is_partial(value) || is_iterator(value) ||
         has_plain_attributes(value);
}

bool is_named(PyObject* key, PyObject* name) {
  return key == name || PyUnicode_Compare(key, name) == 0;  // out of a pickle
}

}  // namespace

PlainSnapshot::~PlainSnapshot() {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_error;
  for (const Entry& entry : entries_) {
    Py_DECREF(entry.now);
    Py_XDECREF(entry.before);
  }
  for (const Empty& each : empty_) Py_DECREF(each.now);
}

void PlainSnapshot::add(Kind kind, PyObject* now, PyObject* before, std::string name,
                        bool names_only) {
  if (before == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  Py_INCREF(now);
  entries_.push_back({kind, now, before, names_only, std::move(name)});
}

void PlainSnapshot::module(PyObject* attributes, const std::string& prefix) {
  static PyObject* const buffers_name = interned("_buffers");
  static PyObject* const parameters_name = interned("_parameters");
  add(Kind::dict, attributes, PyDict_Copy(attributes), prefix);
  const size_t entry = entries_.size() - 1;
  PyObject* const before = entries_.back().before;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  // Names are made of what may change only: most modules hold nothing but empty hooks.
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &key, &value) != 0;) {
    if (is_number_or_text(value)) continue;
    if (is_tensor(value)) {
      tensor(value, prefix);
      continue;
    }
    if (is_empty(value)) {
      Py_INCREF(value);
      empty_.push_back({value, key, entry});
      continue;
    }
    if (!may_change(value)) continue;
    const bool buffers = is_named(key, buffers_name);
    if (PyDict_Check(value) &&
        (buffers || is_named(key, parameters_name) || is_named(key, modules_name()))) {
      add(PyDict_CheckExact(value) ? Kind::dict : Kind::ordered, value, PyDict_Copy(value), prefix,
          /*names_only=*/buffers);
      PyObject* name = nullptr;
      PyObject* buffer = nullptr;
      for (Py_ssize_t i = 0; buffers && PyDict_Next(value, &i, &name, &buffer) != 0;) {
        if (is_tensor(buffer)) tensor(buffer, prefix);
      }
      continue;
    }
    object(value, prefix + py::handle(key).cast<std::string>(), 0);
  }
}

void PlainSnapshot::tensor(PyObject* value, const std::string& name) {
  static PyTypeObject* const parameter = type_of("torch.nn", "Parameter");
  if (tensors_ == nullptr || Py_TYPE(value) == parameter || !meet(value)) return;
  tensors_->push_back({name, THPVariable_Unpack(value)});
}

/// A module that somebody holds, with its children.
bool PlainSnapshot::tree(PyObject* module, const std::string& name) {
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) {
    PyErr_Clear();
    return false;
  }
  PyObject* children = PyDict_CheckExact(attributes.ptr())
                           ? PyDict_GetItemWithError(attributes.ptr(), modules_name())
                           : nullptr;
  if (children == nullptr || !PyDict_Check(children)) return false;
  this->module(attributes.ptr(), name + ".");
  PyObject* key = nullptr;
  PyObject* child = nullptr;
  const py::object copy = owned(PyDict_Copy(children));
  for (Py_ssize_t at = 0; PyDict_Next(copy.ptr(), &at, &key, &child) != 0;) {
    if (child == Py_None || !meet(child)) continue;
    tree(child, name + "." + py::handle(key).cast<std::string>());
  }
  return true;
}

void PlainSnapshot::object(PyObject* value, const std::string& name, int depth) {
  if (value == nullptr || is_number_or_text(value) || depth > kDeepestKept) return;
  if (is_tensor(value)) return tensor(value, name);
  if (is_iterator(value)) return iterator(value, name, /*in_tuple=*/false);
  if (PyTuple_Check(value)) {
    iterators_in_tuple(value, name);
    return items(value, name, depth);
  }
  if (seen_.size() > kMostObjects) return void(overlooked_ = true);
  if (!meet(value)) return;
  if (PyDict_Check(value)) return dict(value, name, depth);
  if (PyList_CheckExact(value)) {
    if (PyList_GET_SIZE(value) > kMostKeptItems) return large(value, name);
    add(Kind::list, value, PyList_AsTuple(value), name);
    return items(entries_.back().before, name, depth);
  }
  if (is_set_or_deque(value)) {
    if (PyObject_Size(value) > kMostKeptItems) return void(overlooked_ = true);
    add(Kind::other, value, PyObject_CallMethod(value, "copy", nullptr), name);
    if (PySet_Check(value)) return;
    const py::object held = owned(PySequence_Tuple(value));
    return items(held.ptr(), name, depth);
  }
  if (PyFunction_Check(value) || PyMethod_Check(value) || is_partial(value)) {
    return function(value, name, depth);
  }
  if (!has_plain_attributes(value) || tree(value, name)) return;
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
  if (!attributes) return PyErr_Clear();
  if (PyDict_CheckExact(attributes.ptr())) dict(attributes.ptr(), name + ".", depth);
}

/// Nobody copies all of it in each step: items may have been added at its end.
void PlainSnapshot::large(PyObject* value, const std::string& name) {
  overlooked_ = true;
  add(Kind::large, value, PyLong_FromSsize_t(PyObject_Size(value)), name);
}

void PlainSnapshot::dict(PyObject* value, const std::string& name, int depth) {
  if (PyDict_GET_SIZE(value) > kMostKeptItems) {
    return PyDict_CheckExact(value) ? large(value, name) : void(overlooked_ = true);
  }
  add(PyDict_CheckExact(value) ? Kind::dict : Kind::ordered, value, PyDict_Copy(value), name);
  if (depth == kDeepestKept) return;
  PyObject* const before = entries_.back().before;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  Py_ssize_t seen = 0;
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &key, &item) != 0;) {
    if (++seen > kMostSeenItems) return void(overlooked_ = true);
    if (!is_number_or_text(item)) object(item, name + "[" + repr_of(key) + "]", depth + 1);
  }
}

void PlainSnapshot::items(PyObject* value, const std::string& name, int depth) {
  if (depth == kDeepestKept) return;
  const Py_ssize_t size = std::min(PyTuple_GET_SIZE(value), kMostSeenItems);
  if (size < PyTuple_GET_SIZE(value)) overlooked_ = true;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GET_ITEM(value, i);
    if (!is_number_or_text(item)) object(item, name + "[" + std::to_string(i) + "]", depth + 1);
  }
}

void PlainSnapshot::function(PyObject* value, const std::string& name, int depth) {
  if (PyMethod_Check(value)) {
    // A function of the module itself: its attributes are known.
    object(PyMethod_GET_SELF(value), name, depth);
    return object(PyMethod_GET_FUNCTION(value), name, depth);
  }
  if (!PyFunction_Check(value)) {
    for (const char* part : {"func", "args", "keywords"}) {
      object(owned(PyObject_GetAttrString(value, part)).ptr(), name, depth);
    }
    return;
  }
  PyObject* closure = PyFunction_GetClosure(value);
  if (closure == nullptr) return;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
    PyObject* cell = PyTuple_GET_ITEM(closure, i);
    if (!PyCell_Check(cell) || !meet(cell)) continue;
    PyObject* held = PyCell_GET(cell);
    Py_XINCREF(held);
    if (held == nullptr) continue;  // is yet to be made
    add(Kind::cell, cell, held, name + ".closure[" + std::to_string(i) + "]");
    object(held, name, depth);
  }
}

}  // namespace infinitybatch::python
