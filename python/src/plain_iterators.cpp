#include "plain_iterators.hpp"

#include "held.hpp"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace infinitybatch::python {
namespace {

constexpr int kMostNested = 32;             // iterators that read from iterators
constexpr size_t kMostTold = 1 << 16;       // of a place, in bytes
constexpr size_t kMostRead = 64;            // iterators
constexpr Py_ssize_t kMostListed = 64;      // items of a list that tell it from another
constexpr Py_ssize_t kMostCopied = 100000;  // what a cycle has seen
constexpr Py_ssize_t kMostSearched = 1024;  // items that may be iterators

py::object attribute(PyObject* value, const char* name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(value, name));
  if (!found) PyErr_Clear();
  return found;
}

/// Told by what it prints.
bool is_scalar(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PyRange_Check(value);
}

std::string identity(PyObject* value) {
  return std::to_string(reinterpret_cast<uintptr_t>(value));
}

/// Their pickles hold all that is left.
bool is_over_keys(PyObject* value) {
  const std::string_view name = Py_TYPE(value)->tp_name;
  return name.starts_with("dict_") || name.starts_with("set_");
}

/// What rebuilds it, as pickles do; null where there is no such thing.
py::object parts_of(PyObject* iterator) {
  if (PyGen_CheckExact(iterator) || is_over_keys(iterator)) return {};
  auto parts =
      py::reinterpret_steal<py::object>(PyObject_CallMethod(iterator, "__reduce__", nullptr));
  if (!parts) PyErr_Clear();
  if (!parts || !PyTuple_Check(parts.ptr()) || PyTuple_GET_SIZE(parts.ptr()) < 2) return {};
  return parts;
}

PyObject* state_in(const py::object& parts) {
  return PyTuple_GET_SIZE(parts.ptr()) > 2 ? PyTuple_GET_ITEM(parts.ptr(), 2) : Py_None;
}

void tell(PyObject* value, int depth, bool in_state, std::string& out);

void tell_generator(PyObject* generator, int depth, std::string& out) {
  const py::object frame = attribute(generator, "gi_frame");
  if (!frame || frame.is_none()) {
    out += "over";
    return;
  }
  // A training loop: forward is called from it, and cannot advance it.
  if (attribute(generator, "gi_running").is(py::handle(Py_True))) {
    out += "running";
    return;
  }
  out += py::repr(attribute(frame.ptr(), "f_lasti")).cast<std::string>();
  // Its locals, and what its loops iterate over.
  static PyObject* const referents =
      py::module_::import("gc").attr("get_referents").cast<py::object>().release().ptr();
  for (const py::handle each : py::handle(referents)(py::handle(generator))) {
    PyObject* held = PyCell_Check(each.ptr()) ? PyCell_GET(each.ptr()) : each.ptr();
    out += ",";
    if (held != nullptr) tell(held, depth + 1, /*in_state=*/false, out);
  }
}

/// A cycle that went around once reads what it has seen: its own place and that of its copies may
/// be told in other words.
bool tell_cycle(PyObject* cycle, const py::object& parts, std::string& out) {
  if (std::string_view(Py_TYPE(cycle)->tp_name) != "itertools.cycle") return false;
  PyObject* const state = state_in(parts);
  if (!PyTuple_Check(state) || PyTuple_GET_SIZE(state) != 2) return false;
  PyObject* const seen = PyTuple_GET_ITEM(state, 0);
  if (PyObject_IsTrue(PyTuple_GET_ITEM(state, 1)) != 1 || !PyList_Check(seen)) return false;
  const py::object inner = parts_of(PyTuple_GET_ITEM(PyTuple_GET_ITEM(parts.ptr(), 1), 0));
  if (!inner || PyList_GET_SIZE(seen) == 0) return false;
  PyObject* const at = state_in(inner);
  const Py_ssize_t index = PyLong_Check(at) ? PyLong_AsSsize_t(at) : 0;
  out += "again," + std::to_string(index % PyList_GET_SIZE(seen));
  return true;
}

void tell(PyObject* value, int depth, bool in_state, std::string& out) {
  if (out.size() > kMostTold) return;
  if (is_scalar(value)) {
    out += py::repr(value).cast<std::string>();
  } else if (PyTuple_CheckExact(value) && depth < kMostNested) {
    out += "(" + std::to_string(PyTuple_GET_SIZE(value)) + ":";
    for (Py_ssize_t i = 0; i < std::min(PyTuple_GET_SIZE(value), kMostListed); ++i) {
      tell(PyTuple_GET_ITEM(value, i), depth + 1, in_state, out);
      out += ",";
    }
    out += ")";
  } else if (PyList_CheckExact(value) && (in_state || PyList_GET_SIZE(value) <= kMostListed)) {
    out += "[" + std::to_string(PyList_GET_SIZE(value));
    for (Py_ssize_t i = 0; !in_state && i < PyList_GET_SIZE(value); ++i) {
      PyObject* const item = PyList_GET_ITEM(value, i);
      out += "," + (is_scalar(item) ? py::repr(item).cast<std::string>() : identity(item));
    }
    out += "]";
  } else if (!is_iterator(value) || depth >= kMostNested) {
    out += identity(value);
  } else if (PyGen_CheckExact(value)) {
    tell_generator(value, depth, out);
  } else if (const py::object parts = parts_of(value)) {
    out += Py_TYPE(value)->tp_name;
    if (tell_cycle(value, parts, out)) return;
    tell(PyTuple_GET_ITEM(parts.ptr(), 1), depth + 1, /*in_state=*/false, out);
    tell(state_in(parts), depth + 1, /*in_state=*/true, out);
  } else if (const Py_ssize_t left = PyObject_LengthHint(value, -1); left >= 0) {
    out += std::to_string(left);
  } else {
    PyErr_Clear();
    out += identity(value);
  }
}

/// What is copied as one thing: iterators in it that read from the same one still do.
class Copier {
 public:
  /// Null where it cannot be copied.
  py::object iterator(PyObject* value) {
    if (!is_iterator(value)) return {};
    const py::object parts = parts_of(value);
    if (!parts) return {};
    const py::object arguments = part(PyTuple_GET_ITEM(parts.ptr(), 1), 0, /*in_state=*/false);
    const py::object state = part(state_in(parts), 0, /*in_state=*/true);
    if (!arguments || !state || !PyTuple_Check(arguments.ptr())) return {};
    auto copy = py::reinterpret_steal<py::object>(
        PyObject_CallObject(PyTuple_GET_ITEM(parts.ptr(), 0), arguments.ptr()));
    if (copy && !state.is_none()) {
      const auto set = py::reinterpret_steal<py::object>(
          PyObject_CallMethod(copy.ptr(), "__setstate__", "(O)", state.ptr()));
      if (!set) copy = {};
    }
    if (!copy) PyErr_Clear();
    return copy;
  }

  std::vector<py::object> reads() && { return std::move(reads_); }

 private:
  py::object part(PyObject* value, int depth, bool in_state) {
    if (PyIter_Check(value)) return read(value);
    if (PyTuple_CheckExact(value) && depth < kMostNested) return tuple(value, depth, in_state);
    // Functions may do more than to return a value.
    if (PyCallable_Check(value) != 0) return {};
    if (!PyList_CheckExact(value)) return py::reinterpret_borrow<py::object>(value);
    for (Py_ssize_t i = 0; i < std::min(PyList_GET_SIZE(value), kMostSearched); ++i) {
      if (PyIter_Check(PyList_GET_ITEM(value, i))) return {};
    }
    if (!in_state) return py::reinterpret_borrow<py::object>(value);
    if (PyList_GET_SIZE(value) > kMostCopied) return {};
    return py::reinterpret_steal<py::object>(  // a cycle still adds to it
        PyList_GetSlice(value, 0, PyList_GET_SIZE(value)));
  }

  py::object read(PyObject* value) {
    for (size_t i = 0; i < reads_.size(); ++i) {
      if (reads_[i].ptr() == value) return copies_[i];  // null while it is at work
    }
    if (reads_.size() == kMostRead) return {};
    const size_t at = reads_.size();
    reads_.push_back(py::reinterpret_borrow<py::object>(value));
    copies_.emplace_back();
    return copies_[at] = iterator(value);
  }

  /// The same one where nothing in it moves.
  py::object tuple(PyObject* value, int depth, bool in_state) {
    py::tuple copy(PyTuple_GET_SIZE(value));
    bool same = true;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      py::object item = part(PyTuple_GET_ITEM(value, i), depth + 1, in_state);
      if (!item) return {};
      same = same && item.ptr() == PyTuple_GET_ITEM(value, i);
      copy[static_cast<size_t>(i)] = item;
    }
    return same ? py::reinterpret_borrow<py::object>(value) : py::object(std::move(copy));
  }

  std::vector<py::object> reads_;
  std::vector<py::object> copies_;
};

}  // namespace

bool is_iterator(PyObject* value) {
  if (PyIter_Check(value) == 0) return false;
  if (PyGen_CheckExact(value)) return true;
  static ska::flat_hash_map<PyTypeObject*, bool> verdicts;
  PyTypeObject* const type = Py_TYPE(value);
  const auto [known, anew] = verdicts.emplace(type, false);
  if (!anew) return known->second;
  Py_INCREF(type);  // no other class is made at its address
  const py::object module = attribute(reinterpret_cast<PyObject*>(type), "__module__");
  if (!module || PyUnicode_Check(module.ptr()) == 0) return false;
  const auto name = module.cast<std::string>();
  return verdicts[type] = name == "builtins" || name == "itertools";
}

std::string place_of(PyObject* iterator) {
  std::string place;
  tell(iterator, 0, /*in_state=*/false, place);
  return place;
}

py::object copy_of_iterator(PyObject* iterator, std::vector<py::object>& reads) {
  Copier copier;
  py::object copy = copier.iterator(iterator);
  reads = std::move(copier).reads();
  return copy;
}

}  // namespace infinitybatch::python
