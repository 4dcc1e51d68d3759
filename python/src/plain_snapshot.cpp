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

constexpr Py_ssize_t kMostKeptItems = 1024;  // of a container: a tokenizer's words are no state
constexpr size_t kMostObjects = 100000;
constexpr int kDeepestKept = 2;

bool is_number_or_text(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

bool counts(PyObject* value) {
  return value != nullptr && (PyLong_CheckExact(value) || PyFloat_CheckExact(value));
}

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

bool is_empty(PyObject* value) {
  return (PyDict_Check(value) && PyDict_GET_SIZE(value) == 0) ||
         (Py_TYPE(value) == &PySet_Type && PySet_GET_SIZE(value) == 0);
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

py::object owned(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

bool same_items(PyObject* a, PyObject* b, bool names_only) {
  if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  PyObject* other_key = nullptr;
  PyObject* other = nullptr;
  Py_ssize_t there = 0;
  for (Py_ssize_t here = 0; PyDict_Next(a, &here, &key, &value) != 0;) {
    if (PyDict_Next(b, &there, &other_key, &other) == 0 || key != other_key) return false;
    if (value != other && !names_only) return false;
  }
  return true;
}

std::string repr_of(PyObject* value) {
  return value == nullptr ? std::string() : py::repr(value).cast<std::string>();
}

/// Another value, or another kind of one (1 and True).
bool is_other(PyObject* before, PyObject* now) {
  if (before == now || now == nullptr || !is_number_or_text(now)) return false;
  if (before == nullptr) return true;
  if (!is_number_or_text(before)) return false;
  return Py_TYPE(before) != Py_TYPE(now) || repr_of(before) != repr_of(now);
}

/// Another thing, where `is_other` does not speak of it.
bool is_other_object(PyObject* before, PyObject* now) {
  if (before == now) return false;
  if (before != nullptr && now != nullptr && is_iterator(before) && is_iterator(now)) return false;
  const bool was = before == nullptr || is_number_or_text(before);
  return now == nullptr || !was || !is_number_or_text(now);
}

PlainObject object_of(std::string name, PyObject* now) {
  if (now == nullptr) return {std::move(name), [] { return std::string("nothing"); }};
  const Held held(py::reinterpret_borrow<py::object>(now));
  return {std::move(name), [held] {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            return description_of(held.get());
          }};
}

/// "layers.0." and an attribute's key, or "[key]" of a dict.
std::string name_of_item(const std::string& owner, PyObject* key) {
  const bool attribute = (owner.empty() || owner.back() == '.') && PyUnicode_Check(key);
  return owner + (attribute ? py::handle(key).cast<std::string>() : "[" + repr_of(key) + "]");
}

PlainNumber number_of(std::string name, const Held& owner, const Held& key, PyObject* before,
                      PyObject* now, void (*set)(PyObject*, PyObject*, PyObject*)) {
  PlainNumber found;
  found.name = std::move(name);
  found.left = repr_of(now);
  const Held old = before != nullptr ? Held(py::reinterpret_borrow<py::object>(before)) : Held();
  found.put_back = [owner, key, old, set] {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    set(owner.get(), key.get(), old.get());
  };
  if (!counts(before) || !counts(now)) return found;
  const double from = PyFloat_AsDouble(before);
  const double to = PyFloat_AsDouble(now);
  PyErr_Clear();  // of an int that no double can hold
  found.by = to - from;
  found.move = [owner, key, old, set](double by) {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    const bool whole = PyLong_CheckExact(old.get());
    const py::object more = owned(whole ? PyLong_FromDouble(by) : PyFloat_FromDouble(by));
    const py::object sum = owned(PyNumber_Add(old.get(), more.ptr()));
    set(owner.get(), key.get(), sum.ptr());
  };
  return found;
}

void set_in_dict(PyObject* dict, PyObject* key, PyObject* value) {
  if (value != nullptr) return raise_if(PyObject_SetItem(dict, key, value));
  if (PyDict_Contains(dict, key) == 1) raise_if(PyObject_DelItem(dict, key));
}

/// Item by item: the dict of an object shares its keys with others.
void put_back_items(PyObject* dict, PyObject* before) {
  const py::object now = owned(PyDict_Copy(dict));
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(now.ptr(), &at, &key, &value) != 0;) {
    PyObject* old = PyDict_GetItemWithError(before, key);
    if (old == nullptr) raise_if(PyDict_DelItem(dict, key));
  }
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &key, &value) != 0;) {
    if (PyDict_GetItemWithError(dict, key) != value) raise_if(PyDict_SetItem(dict, key, value));
  }
}

void set_in_list(PyObject* list, PyObject* index, PyObject* value) {
  raise_if(PyObject_SetItem(list, index, value));
}

void set_in_cell(PyObject* cell, PyObject* /*key*/, PyObject* value) {
  raise_if(PyCell_Set(cell, value));
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
  for (PyObject* each : empty_) Py_DECREF(each);
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
      empty_.push_back(value);
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
  if (seen_.size() > kMostObjects || !meet(value)) return;
  if (PyDict_Check(value)) return dict(value, name, depth);
  if (PyList_CheckExact(value)) {
    if (PyList_GET_SIZE(value) > kMostKeptItems) return;
    add(Kind::list, value, PyList_AsTuple(value), name);
    return items(entries_.back().before, name, depth);
  }
  if (is_set_or_deque(value)) {
    if (PyObject_Size(value) > kMostKeptItems) return;
    return add(Kind::other, value, PyObject_CallMethod(value, "copy", nullptr), name);
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

void PlainSnapshot::dict(PyObject* value, const std::string& name, int depth) {
  if (PyDict_GET_SIZE(value) > kMostKeptItems) return;
  add(PyDict_CheckExact(value) ? Kind::dict : Kind::ordered, value, PyDict_Copy(value), name);
  if (depth == kDeepestKept) return;
  PyObject* const before = entries_.back().before;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &key, &item) != 0;) {
    if (!is_number_or_text(item)) object(item, name + "[" + repr_of(key) + "]", depth + 1);
  }
}

void PlainSnapshot::items(PyObject* value, const std::string& name, int depth) {
  if (depth == kDeepestKept || PyTuple_GET_SIZE(value) > kMostKeptItems) return;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
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

bool PlainSnapshot::differs(const Entry& entry) {
  switch (entry.kind) {
    case Kind::dict:
    case Kind::ordered:
      return !same_items(entry.now, entry.before, entry.names_only);
    case Kind::list: {
      const Py_ssize_t size = PyList_GET_SIZE(entry.now);
      if (size != PyTuple_GET_SIZE(entry.before)) return true;
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (PyList_GET_ITEM(entry.now, i) != PyTuple_GET_ITEM(entry.before, i)) return true;
      }
      return false;
    }
    case Kind::other: {
      const int same = PyObject_RichCompareBool(entry.now, entry.before, Py_EQ);
      if (same < 0) PyErr_Clear();  // of tensors: nobody can tell
      return same != 1;
    }
    case Kind::cell:
      return PyCell_GET(entry.now) != entry.before;
  }
  return false;
}

void PlainSnapshot::put_back(const Entry& entry) {
  switch (entry.kind) {
    case Kind::dict:
    case Kind::ordered: {
      if (entry.names_only) {
        const py::object now = owned(PyDict_Copy(entry.now));
        PyObject* key = nullptr;
        PyObject* value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(now.ptr(), &at, &key, &value) != 0;) {
          if (PyDict_Contains(entry.before, key) != 1) raise_if(PyObject_DelItem(entry.now, key));
        }
        for (Py_ssize_t at = 0; PyDict_Next(entry.before, &at, &key, &value) != 0;) {
          if (PyDict_Contains(entry.now, key) != 1) {
            raise_if(PyObject_SetItem(entry.now, key, value));
          }
        }
        return;
      }
      if (entry.kind == Kind::dict) return put_back_items(entry.now, entry.before);
      // An OrderedDict keeps a list of its own.
      owned(PyObject_CallMethod(entry.now, "clear", nullptr));
      owned(PyObject_CallMethod(entry.now, "update", "O", entry.before));
      return;
    }
    case Kind::list:
      return raise_if(PyList_SetSlice(entry.now, 0, PyList_GET_SIZE(entry.now), entry.before));
    case Kind::other: {
      owned(PyObject_CallMethod(entry.now, "clear", nullptr));
      const char* const add = PySet_Check(entry.now) ? "update" : "extend";
      owned(PyObject_CallMethod(entry.now, add, "O", entry.before));
      return;
    }
    case Kind::cell:
      return raise_if(PyCell_Set(entry.now, entry.before));
  }
}

bool PlainSnapshot::changed() const {
  return std::any_of(empty_.begin(), empty_.end(),
                     [](PyObject* each) { return !is_empty(each); }) ||
         std::any_of(entries_.begin(), entries_.end(), &differs) ||
         std::any_of(iterators_.begin(), iterators_.end(),
                     [this](const Iterator& each) { return has_moved(each); });
}

void PlainSnapshot::restore() const {
  for (PyObject* each : empty_) {
    if (!is_empty(each)) owned(PyObject_CallMethod(each, "clear", nullptr));
  }
  for (const Entry& entry : entries_) {
    if (differs(entry)) put_back(entry);
  }
  put_back_iterators();
}

std::vector<PlainNumber> PlainSnapshot::numbers() const {
  std::vector<PlainNumber> found;
  add_moved_iterators(found);
  for (const Entry& entry : entries_) {
    if (entry.names_only || !differs(entry)) continue;
    const Held owner(py::reinterpret_borrow<py::object>(entry.now));
    if (entry.kind == Kind::cell) {
      PyObject* now = PyCell_GET(entry.now);
      if (!is_other(entry.before, now)) continue;
      found.push_back(number_of(entry.name, owner, Held(), entry.before, now, &set_in_cell));
    } else if (entry.kind == Kind::list) {
      const Py_ssize_t size = std::min(PyList_GET_SIZE(entry.now), PyTuple_GET_SIZE(entry.before));
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* before = PyTuple_GET_ITEM(entry.before, i);
        PyObject* now = PyList_GET_ITEM(entry.now, i);
        if (!is_other(before, now)) continue;
        const Held index(owned(PyLong_FromSsize_t(i)));
        found.push_back(number_of(entry.name + "[" + std::to_string(i) + "]", owner, index, before,
                                  now, &set_in_list));
      }
    } else if (entry.kind == Kind::dict || entry.kind == Kind::ordered) {
      PyObject* key = nullptr;
      PyObject* now = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(entry.now, &at, &key, &now) != 0;) {
        PyObject* before = PyDict_GetItemWithError(entry.before, key);
        if (!is_other(before, now)) continue;
        found.push_back(number_of(name_of_item(entry.name, key), owner,
                                  Held(py::reinterpret_borrow<py::object>(key)), before, now,
                                  &set_in_dict));
      }
    }
  }
  return found;
}

std::vector<PlainObject> PlainSnapshot::objects() const {
  std::vector<PlainObject> found;
  for (PyObject* each : empty_) {
    if (!is_empty(each)) found.push_back(object_of("(an empty dict or set)", each));
  }
  for (const Entry& entry : entries_) {
    if (entry.names_only || !differs(entry)) continue;
    switch (entry.kind) {
      case Kind::cell:
        if (PyObject* now = PyCell_GET(entry.now); is_other_object(entry.before, now)) {
          found.push_back(object_of(entry.name, now));
        }
        break;
      case Kind::other:
        found.push_back(object_of(entry.name, entry.now));
        break;
      case Kind::list: {
        const Py_ssize_t size = PyList_GET_SIZE(entry.now);
        bool other = size != PyTuple_GET_SIZE(entry.before);
        for (Py_ssize_t i = 0; !other && i < size; ++i) {
          other = is_other_object(PyTuple_GET_ITEM(entry.before, i), PyList_GET_ITEM(entry.now, i));
        }
        if (other) found.push_back(object_of(entry.name, entry.now));
        break;
      }
      case Kind::dict:
      case Kind::ordered: {
        PyObject* key = nullptr;
        PyObject* value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(entry.now, &at, &key, &value) != 0;) {
          if (!is_other_object(PyDict_GetItemWithError(entry.before, key), value)) continue;
          found.push_back(object_of(name_of_item(entry.name, key), value));
        }
        for (Py_ssize_t at = 0; PyDict_Next(entry.before, &at, &key, &value) != 0;) {
          if (PyDict_GetItemWithError(entry.now, key) != nullptr) continue;
          found.push_back(object_of(name_of_item(entry.name, key), nullptr));
        }
        break;
      }
    }
  }
  return found;
}

}  // namespace infinitybatch::python
