// The part of PlainSnapshot that tells what is another now, and puts it back.
#include "plain_snapshot.hpp"

#include "module_attributes.hpp"
#include "plain_description.hpp"
#include "plain_iterators.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::python {
namespace {

bool counts(PyObject* value) {
  return value != nullptr && (PyLong_CheckExact(value) || PyFloat_CheckExact(value));
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

/// An `nn.Parameter` that gets a gradient.
at::Tensor parameter_of(PyObject* object) {
  static PyObject* const type =
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  const bool is_one =
      object != nullptr && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type));
  const at::Tensor tensor = is_one ? tensor_or_nothing(object) : at::Tensor();
  return tensor.defined() && tensor.requires_grad() ? tensor : at::Tensor();
}

PlainObject object_of(std::string name, PyObject* now, PyObject* before = nullptr) {
  const at::Tensor stood = parameter_of(before);
  if (now == nullptr) return {std::move(name), [] { return std::string("nothing"); }, {}, stood};
  const Held held(py::reinterpret_borrow<py::object>(now));
  return {std::move(name),
          [held] {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            return description_of(held.get());
          },
          parameter_of(now), stood};
}

/// Names that are in one of two dicts alone.
void add_other_names(const std::string& owner, PyObject* before, PyObject* now,
                     std::vector<PlainObject>& found) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(now, &at, &key, &value) != 0;) {
    if (PyDict_GetItemWithError(before, key) != nullptr) continue;
    found.push_back(object_of(owner + py::handle(key).cast<std::string>(), value));
  }
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &key, &value) != 0;) {
    if (PyDict_GetItemWithError(now, key) != nullptr) continue;
    found.push_back(object_of(owner + py::handle(key).cast<std::string>(), nullptr));
  }
}

/// What forward has put into a dict or set that was empty: buffers and parameters by their names.
void add_first_items(PyObject* now, std::vector<PlainObject>& found) {
  bool named = PyDict_Check(now);
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; named && PyDict_Next(now, &at, &key, &value) != 0;) {
    named = PyUnicode_Check(key) != 0 && is_tensor(value);
  }
  if (!named) return found.push_back(object_of("(an empty dict or set)", now));
  const py::object empty = owned(PyDict_New());
  add_other_names("", empty.ptr(), now, found);
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
    if (!is_empty(each)) add_first_items(each, found);
  }
  for (const Entry& entry : entries_) {
    if (!differs(entry)) continue;
    if (entry.names_only) {
      add_other_names(entry.name, entry.before, entry.now, found);
      continue;
    }
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
          PyObject* before = PyDict_GetItemWithError(entry.before, key);
          if (!is_other_object(before, value)) continue;
          found.push_back(object_of(name_of_item(entry.name, key), value, before));
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
