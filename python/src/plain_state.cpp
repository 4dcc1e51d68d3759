#include "module_attributes.hpp"
#include "module_walk.hpp"
#include "plain_snapshot.hpp"

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

constexpr Py_ssize_t kMostTensors = 16;  // of a container: a tokenizer's words are no state
constexpr int kDeepestTensor = 2;

bool may_hold_tensors(PyObject* value) {
  return is_tensor(value) || PyTuple_Check(value) || PyList_CheckExact(value) ||
         PyDict_CheckExact(value);
}

/// Functions of classes may have closures, too.
void note_forward(PlainSnapshot& snapshot, PyObject* module) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  if (!snapshot.meet(type)) return;
  static PyObject* const forward_name = interned("forward");
  const auto forward = py::reinterpret_steal<py::object>(PyObject_GetAttr(type, forward_name));
  if (!forward) return PyErr_Clear();
  if (PyFunction_Check(forward.ptr())) snapshot.object(forward.ptr(), "forward", 0);
}

class StateWalk {
 public:
  /// \param snapshot what lies in the attributes is noted there; null where nobody asks
  explicit StateWalk(PlainSnapshot* snapshot) : snapshot_(snapshot) {}

  void module(PyObject* module, const std::string& prefix) {
    if (!modules_.insert(module).second) return;
    auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) return PyErr_Clear();
    if (!PyDict_CheckExact(attributes.ptr())) return;
    PyObject* children = PyDict_GetItemWithError(attributes.ptr(), modules_name());
    if (children == nullptr || !PyDict_Check(children)) {  // ordered, in old pickles
      if (snapshot_ != nullptr) attributes_of(attributes.ptr());
      return;
    }
    if (snapshot_ != nullptr) {
      snapshot_->meet(module);
      snapshot_->module(attributes.ptr(), prefix);
      note_forward(*snapshot_, module);
    }
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

 private:
  /// Of what is no module: a function with its parameters.
  void attributes_of(PyObject* attributes) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &key, &value) != 0;) {
      snapshot_->object(value, py::handle(key).cast<std::string>(), 0);
    }
  }

  void take(PyObject* value, const std::string& name, int depth) {
    if (is_tensor(value)) {
      tensors_.push_back({name, THPVariable_Unpack(value)});
      return;
    }
    if (depth == kDeepestTensor) return;
    const auto each = [&](PyObject* item, const std::string& key) {
      if (may_hold_tensors(item)) take(item, name + "[" + key + "]", depth + 1);
    };
    if (PyTuple_Check(value)) {
      const Py_ssize_t size = std::min(PyTuple_GET_SIZE(value), kMostTensors);
      for (Py_ssize_t i = 0; i < size; ++i) each(PyTuple_GET_ITEM(value, i), std::to_string(i));
    } else if (PyList_CheckExact(value)) {
      const Py_ssize_t size = std::min(PyList_GET_SIZE(value), kMostTensors);
      for (Py_ssize_t i = 0; i < size; ++i) each(PyList_GET_ITEM(value, i), std::to_string(i));
    } else if (PyDict_CheckExact(value)) {
      PyObject* key = nullptr;
      PyObject* item = nullptr;
      Py_ssize_t count = 0;
      for (Py_ssize_t at = 0; count < kMostTensors && PyDict_Next(value, &at, &key, &item) != 0;) {
        ++count;
        each(item, py::repr(key).cast<std::string>());
      }
    }
  }

  PlainSnapshot* snapshot_;
  std::vector<NamedParameter> tensors_;
  ska::flat_hash_set<PyObject*> modules_;
};

/// With the interpreter's exception, if there is one, put aside.
template <typename Do>
auto undisturbed(const std::shared_ptr<PlainSnapshot>& snapshot, Do what) {
  return [snapshot, what] {
    const py::gil_scoped_acquire gil;
    const py::error_scope keep_error;
    return what(*snapshot);
  };
}

}  // namespace

PlainState plain_state(py::handle model) {
  const auto snapshot = std::make_shared<PlainSnapshot>();
  StateWalk walk(snapshot.get());
  walk.module(model.ptr(), "");
  return {std::move(walk).tensors(),
          /*complete=*/!snapshot->overlooked(),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { kept.restore(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.changed(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.numbers(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.objects(); })};
}

PlainState held_state(py::handle object) {
  std::vector<NamedParameter> tensors;
  const auto snapshot = std::make_shared<PlainSnapshot>(&tensors);
  snapshot->object(object.ptr(), "loss", 0);
  snapshot->collect_no_more();
  return {std::move(tensors),
          /*complete=*/false,
          undisturbed(snapshot, [](const PlainSnapshot& kept) { kept.restore(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.changed(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.numbers(); }),
          undisturbed(snapshot, [](const PlainSnapshot& kept) { return kept.objects(); })};
}

std::vector<NamedParameter> plain_tensors(py::handle model) {
  StateWalk walk(/*snapshot=*/nullptr);
  walk.module(model.ptr(), "");
  return std::move(walk).tensors();
}

}  // namespace infinitybatch::python
