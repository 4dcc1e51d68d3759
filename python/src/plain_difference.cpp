// The part of PlainSnapshot that tells what is another now, and puts it back.
#include "plain_snapshot.hpp"

#include "leaves_in.hpp"
#include "module_attributes.hpp"
#include "plain_description.hpp"
#include "plain_iterators.hpp"

#include <algorithm>
#include <string_view>
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

/// Of `leaves` those that are not among `others`.
std::vector<PlainLeaf> without(std::vector<PlainLeaf> leaves,
                               const std::vector<PlainLeaf>& others) {
  std::erase_if(leaves, [&](const PlainLeaf& leaf) {
    return std::any_of(others.begin(), others.end(),
                       [&](const PlainLeaf& other) { return other.tensor.is_same(leaf.tensor); });
  });
  return leaves;
}

using Set = void (*)(PyObject*, PyObject*, PyObject*);

/// With the interpreter's exception, if there is one, put aside.
std::function<void()> putting(const Held& owner, const Held& key, PyObject* value, Set set) {
  const Held held = value != nullptr ? Held(py::reinterpret_borrow<py::object>(value)) : Held();
  return [owner, key, held, set] {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    set(owner.get(), key.get(), held.get());
  };
}

/// \param contents of it, where it may be another by the time that it is described; null where
/// there is nothing
/// \param before what these were
PlainObject object_of(std::string name, PyObject* contents, PyObject* before,
                      std::function<void()> put_in) {
  PlainObject found;
  const std::vector<PlainLeaf> leaves = leaves_in(contents);
  const std::vector<PlainLeaf> leaves_before = leaves_in(before);
  found.leaves = without(leaves, leaves_before);
  found.leaves_before = without(leaves_before, leaves);
  found.name = std::move(name);
  found.put_in = std::move(put_in);
  found.describe = [] { return std::string("nothing"); };
  if (contents == nullptr) return found;
  const Held held(py::reinterpret_borrow<py::object>(contents));
  found.describe = [held] {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    return description_of(held.get());
  };
  return found;
}

/// "layers.0." and an attribute's key, or "[key]" of a dict.
std::string name_of_item(const std::string& owner, PyObject* key) {
  const bool attribute = (owner.empty() || owner.back() == '.') && PyUnicode_Check(key);
  return owner + (attribute ? py::handle(key).cast<std::string>() : "[" + repr_of(key) + "]");
}

PlainNumber number_of(std::string name, const Held& owner, const Held& key, PyObject* before,
                      PyObject* now, Set set) {
  PlainNumber found;
  found.name = std::move(name);
  found.left = repr_of(now);
  found.put_back = putting(owner, key, before, set);
  found.put_in = putting(owner, key, now, set);
  const bool none = before == nullptr || before == Py_None;
  if (!counts(now) || (!none && !counts(before))) return found;
  found.from = none ? 0 : PyFloat_AsDouble(before);
  const double to = PyFloat_AsDouble(now);
  PyErr_Clear();  // of an int that no double can hold
  found.by = to - found.from;
  found.set = [owner, key, set, whole = PyLong_CheckExact(now) != 0](double value) {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    const py::object made = owned(whole ? PyLong_FromDouble(value) : PyFloat_FromDouble(value));
    set(owner.get(), key.get(), made.ptr());
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

/// Nothing where the list has become shorter.
void set_in_list(PyObject* list, PyObject* index, PyObject* value) {
  const Py_ssize_t place = PyLong_AsSsize_t(index);
  if (place >= PyList_GET_SIZE(list) || value == nullptr) return;
  Py_INCREF(value);
  raise_if(PyList_SetItem(list, place, value));
}

void set_list(PyObject* list, PyObject* /*key*/, PyObject* items) {
  raise_if(PyList_SetSlice(list, 0, PyList_GET_SIZE(list), items));
}

/// An OrderedDict keeps a list of its own; a Counter adds where it should replace.
void set_dict(PyObject* dict, PyObject* /*key*/, PyObject* items) {
  if (PyODict_Check(dict)) {
    owned(PyObject_CallMethod(dict, "clear", nullptr));
    owned(PyObject_CallMethod(dict, "update", "O", items));
    return;
  }
  PyDict_Clear(dict);
  raise_if(PyDict_Update(dict, items));
}

void set_other(PyObject* other, PyObject* /*key*/, PyObject* items) {
  owned(PyObject_CallMethod(other, "clear", nullptr));
  owned(PyObject_CallMethod(other, PySet_Check(other) ? "update" : "extend", "O", items));
}

py::object copy_of(PyObject* container) {
  if (PyList_Check(container)) return owned(PyList_AsTuple(container));
  return owned(PyObject_CallMethod(container, "copy", nullptr));
}

/// The hooks of a module, by names that are others each time.
bool is_of_hooks(const std::string& name) {
  const size_t dot = name.rfind('.');
  return std::string_view(name).substr(dot == std::string::npos ? 0 : dot + 1).starts_with("_") &&
         name.find("_hooks", dot == std::string::npos ? 0 : dot) != std::string::npos;
}

/// As one thing. \param dict of them
PlainObject hooks_of(const std::string& name, PyObject* dict) {
  const Held owner(py::reinterpret_borrow<py::object>(dict));
  const py::object all = owned(PyDict_Copy(dict));
  const py::object hooks = owned(PyDict_Values(dict));
  PlainObject found =
      object_of(name, hooks.ptr(), nullptr, putting(owner, Held(), all.ptr(), &set_dict));
  found.decides = true;
  return found;
}

/// What an op gives is left for others to read; anything else may decide what the next forward
/// does.
bool is_of_tensors(PyObject* value) {
  if (value == nullptr) return false;
  if (is_tensor(value)) return true;
  if (!PyTuple_Check(value) && !PyList_Check(value)) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_tensor(PySequence_Fast_GET_ITEM(value, i))) return false;
  }
  return size > 0;
}

/// A set that has items now, where it had none.
PlainObject filled(std::string name, PyObject* now) {
  const Held owner(py::reinterpret_borrow<py::object>(now));
  const py::object contents = copy_of(now);
  PlainObject found = object_of(std::move(name), contents.ptr(), nullptr,
                                putting(owner, Held(), contents.ptr(), &set_other));
  found.decides = true;
  return found;
}

/// What a large container had at its end is removed.
void shorten(PyObject* container, Py_ssize_t size) {
  if (PyList_Check(container)) {
    const Py_ssize_t now = PyList_GET_SIZE(container);
    if (now > size) raise_if(PyList_SetSlice(container, size, now, nullptr));
    return;
  }
  while (PyDict_GET_SIZE(container) > size) {
    owned(PyObject_CallMethod(container, "popitem", nullptr));
  }
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
    case Kind::large:
      return PyObject_Size(entry.now) != PyLong_AsSsize_t(entry.before);
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
      return set_dict(entry.now, nullptr, entry.before);
    }
    case Kind::list:
      return set_list(entry.now, nullptr, entry.before);
    case Kind::other:
      return set_other(entry.now, nullptr, entry.before);
    case Kind::cell:
      return raise_if(PyCell_Set(entry.now, entry.before));
    case Kind::large:
      return shorten(entry.now, PyLong_AsSsize_t(entry.before));
  }
}

/// What a module registers has the module's name in front.
std::string PlainSnapshot::name_of(const Empty& empty) const {
  const std::string& owner = entries_[empty.entry].name;
  return is_listed(empty.key) ? owner : name_of_item(owner, empty.key);
}

bool PlainSnapshot::changed() const {
  return std::any_of(empty_.begin(), empty_.end(),
                     [](const Empty& each) { return !is_empty(each.now); }) ||
         std::any_of(entries_.begin(), entries_.end(), &differs) ||
         std::any_of(iterators_.begin(), iterators_.end(),
                     [this](const Iterator& each) { return has_moved(each); });
}

void PlainSnapshot::restore() const {
  for (const Empty& each : empty_) {
    if (!is_empty(each.now)) owned(PyObject_CallMethod(each.now, "clear", nullptr));
  }
  for (const Entry& entry : entries_) {
    if (differs(entry)) put_back(entry);
  }
  put_back_iterators();
}

namespace {

/// \param before null where it had no item
void add_numbers_of_dict(const std::string& name, PyObject* dict, PyObject* before,
                         std::vector<PlainNumber>& found) {
  const Held owner(py::reinterpret_borrow<py::object>(dict));
  PyObject* key = nullptr;
  PyObject* now = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &now) != 0;) {
    PyObject* old = before == nullptr ? nullptr : PyDict_GetItemWithError(before, key);
    if (!is_other(old, now)) continue;
    found.push_back(number_of(name_of_item(name, key), owner,
                              Held(py::reinterpret_borrow<py::object>(key)), old, now,
                              &set_in_dict));
    found.back().added = old == nullptr;
  }
}

void add_numbers_of_list(const std::string& name, PyObject* list, PyObject* before,
                         std::vector<PlainNumber>& found) {
  constexpr Py_ssize_t kMostAppended = 64;
  const Held owner(py::reinterpret_borrow<py::object>(list));
  const Py_ssize_t had = PyTuple_GET_SIZE(before);
  const Py_ssize_t size = std::min(PyList_GET_SIZE(list), had + kMostAppended);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* old = i < had ? PyTuple_GET_ITEM(before, i) : nullptr;
    PyObject* now = PyList_GET_ITEM(list, i);
    if (!is_other(old, now)) continue;
    const Held index(owned(PyLong_FromSsize_t(i)));
    const std::string place = i < had ? std::to_string(i) : "end + " + std::to_string(i - had);
    found.push_back(number_of(name + "[" + place + "]", owner, index, old, now, &set_in_list));
    found.back().appended = i >= had;
  }
}

}  // namespace

std::vector<PlainNumber> PlainSnapshot::numbers() const {
  std::vector<PlainNumber> found;
  add_moved_iterators(found);
  for (const Empty& each : empty_) {
    if (PyDict_Check(each.now) && !is_empty(each.now) && !is_of_hooks(name_of(each))) {
      add_numbers_of_dict(name_of(each), each.now, nullptr, found);
    }
  }
  for (const Entry& entry : entries_) {
    if (entry.names_only || !differs(entry)) continue;
    if (entry.kind == Kind::cell) {
      PyObject* now = PyCell_GET(entry.now);
      if (!is_other(entry.before, now)) continue;
      const Held owner(py::reinterpret_borrow<py::object>(entry.now));
      found.push_back(number_of(entry.name, owner, Held(), entry.before, now, &set_in_cell));
    } else if (entry.kind == Kind::list) {
      add_numbers_of_list(entry.name, entry.now, entry.before, found);
    } else if ((entry.kind == Kind::dict || entry.kind == Kind::ordered) &&
               !is_of_hooks(entry.name)) {
      add_numbers_of_dict(entry.name, entry.now, entry.before, found);
    }
  }
  return found;
}

namespace {

/// \param before null where it had no item, `now` where it has none: a module that takes the place
/// of None is registered elsewhere, under the same name
void add_item(const std::string& owner, PyObject* dict, PyObject* key, PyObject* now,
              PyObject* before, std::vector<PlainObject>& found) {
  const Held held(py::reinterpret_borrow<py::object>(dict));
  const Held place(py::reinterpret_borrow<py::object>(key));
  std::string name = name_of_item(owner, key);
  if (now == nullptr) name += " (deleted)";
  PlainObject& each = found.emplace_back(
      object_of(std::move(name), now, before, putting(held, place, now, &set_in_dict)));
  each.decides = !is_of_tensors(now);
  each.added = before == nullptr;
}

/// Buffers whose names are new; whoever watches buffers knows the others, and puts them back.
void add_new_names(const std::string& owner, PyObject* now, PyObject* before,
                   std::vector<PlainObject>& found) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(now, &at, &key, &value) != 0;) {
    if (PyDict_GetItemWithError(before, key) != nullptr) continue;
    add_item(owner, now, key, value, nullptr, found);
  }
}

}  // namespace

std::vector<PlainObject> PlainSnapshot::objects() const {
  std::vector<PlainObject> found;
  for (const Empty& each : empty_) {
    if (is_empty(each.now)) continue;
    if (!PyDict_Check(each.now)) {
      found.push_back(filled(name_of(each), each.now));
      continue;
    }
    if (is_of_hooks(name_of(each))) {
      found.push_back(hooks_of(name_of(each), each.now));
      continue;
    }
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(each.now, &at, &key, &value) != 0;) {
      if (!is_number_or_text(value)) add_item(name_of(each), each.now, key, value, nullptr, found);
    }
  }
  for (const Entry& entry : entries_) {
    if (!differs(entry)) continue;
    if (entry.names_only) {
      add_new_names(entry.name, entry.now, entry.before, found);
      continue;
    }
    const Held owner(py::reinterpret_borrow<py::object>(entry.now));
    switch (entry.kind) {
      case Kind::cell:
        if (PyObject* now = PyCell_GET(entry.now); is_other_object(entry.before, now)) {
          found.push_back(
              object_of(entry.name, now, entry.before, putting(owner, Held(), now, &set_in_cell)));
          found.back().decides = !is_of_tensors(now);
        }
        break;
      case Kind::large:
        break;
      case Kind::other: {
        const py::object now = copy_of(entry.now);
        found.push_back(object_of(entry.name, now.ptr(), entry.before,
                                  putting(owner, Held(), now.ptr(), &set_other)));
        found.back().decides = true;  // one that is bounded keeps its size
        break;
      }
      case Kind::list: {
        const Py_ssize_t size = PyList_GET_SIZE(entry.now);
        bool other = size != PyTuple_GET_SIZE(entry.before);
        for (Py_ssize_t i = 0; !other && i < size; ++i) {
          other = is_other_object(PyTuple_GET_ITEM(entry.before, i), PyList_GET_ITEM(entry.now, i));
        }
        if (!other) break;
        const py::object now = copy_of(entry.now);
        found.push_back(object_of(entry.name, now.ptr(), entry.before,
                                  putting(owner, Held(), now.ptr(), &set_list)));
        found.back().decides = size != PyTuple_GET_SIZE(entry.before);
        break;
      }
      case Kind::dict:
      case Kind::ordered: {
        if (is_of_hooks(entry.name)) {
          found.push_back(hooks_of(entry.name, entry.now));
          break;
        }
        PyObject* key = nullptr;
        PyObject* value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(entry.now, &at, &key, &value) != 0;) {
          PyObject* before = PyDict_GetItemWithError(entry.before, key);
          if (is_other_object(before, value)) {
            add_item(entry.name, entry.now, key, value, before, found);
          }
        }
        for (Py_ssize_t at = 0; PyDict_Next(entry.before, &at, &key, &value) != 0;) {
          if (PyDict_GetItemWithError(entry.now, key) != nullptr) continue;
          add_item(entry.name, entry.now, key, nullptr, value, found);
        }
        break;
      }
    }
  }
  return found;
}

}  // namespace infinitybatch::python
