#include "module_walk.hpp"

#include "module_attributes.hpp"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace infinitybatch::python {
namespace {

/// infinitybatch._model.is_ordinary, asked once for each class of modules.
bool is_ordinary(PyTypeObject* kind) {
  static auto& known = *new std::unordered_map<PyTypeObject*, std::pair<bool, Held>>;
  const auto found = known.find(kind);
  if (found != known.end()) return found->second.first;
  constexpr size_t kMost = 4096;  // classes that are made anew all the time
  if (known.size() >= kMost) known.clear();
  static const py::handle ask =
      py::object(py::module_::import("infinitybatch._model").attr("is_ordinary")).release();
  const auto type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(kind));
  const bool answer = ask(type).cast<bool>();
  known.emplace(kind, std::pair(answer, Held(type)));  // held: nobody else gets its address
  return answer;
}

PyTypeObject* parameter_type() {
  static PyObject* type =
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

class Walk {
 public:
  /// False where Python must look.
  bool module(PyObject* module, const std::string& prefix) {
    if (!modules_.insert(module).second) return true;
    if (!is_ordinary(Py_TYPE(module))) return false;
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) {
      PyErr_Clear();
      return false;
    }
    static PyObject* const parameters_name = interned("_parameters");
    static PyObject* const buffers_name = interned("_buffers");
    static PyObject* const compiled_name = interned("_compiled_call_impl");
    static PyObject* const traversal_name = interned("named_modules");
    PyObject* dict = attributes.ptr();
    PyObject* compiled = PyDict_GetItemWithError(dict, compiled_name);
    if (compiled != nullptr && compiled != Py_None) return false;
    if (PyDict_GetItemWithError(dict, traversal_name) != nullptr) return false;
    PyObject* children = dict_in(dict, modules_name());
    PyObject* parameters = dict_in(dict, parameters_name);
    PyObject* buffers = dict_in(dict, buffers_name);
    if (children == nullptr || parameters == nullptr || buffers == nullptr) return false;
    return parameters_of(parameters, prefix) && buffers_of(buffers, prefix) &&
           children_of(children, prefix);
  }

  Owned take() { return std::move(owned_); }

 private:
  static std::string joined(const std::string& prefix, PyObject* key) {
    return prefix + py::handle(key).cast<std::string>();
  }

  bool parameters_of(PyObject* parameters, const std::string& prefix) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(parameters, &at, &key, &value) != 0;) {
      if (value == Py_None) continue;
      if (Py_TYPE(value) != parameter_type()) return false;
      if (!tensors_.insert(value).second) continue;
      owned_.parameters.push_back({joined(prefix, key), THPVariable_Unpack(value)});
    }
    return true;
  }

  bool buffers_of(PyObject* buffers, const std::string& prefix) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(buffers, &at, &key, &value) != 0;) {
      if (Py_TYPE(value) == parameter_type()) continue;
      // One that holds nothing may be given a tensor by forward.
      const bool ordinary =
          value == Py_None || Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
      if (!ordinary) return false;
      if (value != Py_None) tensors_.insert(value);
      const Held owner(py::reinterpret_borrow<py::object>(buffers));
      const Held name(py::reinterpret_borrow<py::object>(key));
      owned_.buffers.push_back(dict_slot(joined(prefix, key), owner, name));
    }
    return true;
  }

  bool children_of(PyObject* children, const std::string& prefix) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(children, &at, &key, &value) != 0;) {
      if (value == Py_None) continue;
      if (!module(value, joined(prefix, key) + ".")) return false;
    }
    return true;
  }

  Owned owned_;
  ska::flat_hash_set<PyObject*> modules_;
  ska::flat_hash_set<PyObject*> tensors_;
};

}  // namespace

std::optional<Owned> walk_ordinary(py::handle model) {
  Walk walk;
  if (!walk.module(model.ptr(), "")) return std::nullopt;
  return walk.take();
}

BufferSlot dict_slot(std::string name, const Held& buffers, const Held& key) {
  // `del self.mean` leaves another nothing than `self.mean = None` does: what was seen last is put
  // back.
  const auto is_gone = std::make_shared<bool>(false);
  return {std::move(name),
          [buffers, key, is_gone] {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            PyObject* now = PyDict_GetItemWithError(buffers.get(), key.get());
            const at::Tensor tensor = tensor_or_nothing(now);
            if (!tensor.defined()) *is_gone = now == nullptr;
            return tensor;
          },
          [buffers, key, is_gone](const at::Tensor& tensor) {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            if (!tensor.defined() && *is_gone) {
              if (PyDict_Contains(buffers.get(), key.get()) == 1) {
                raise_if(PyDict_DelItem(buffers.get(), key.get()));
              }
              return;
            }
            const auto value = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
            if (PyDict_SetItem(buffers.get(), key.get(), value.ptr()) != 0) {
              throw py::error_already_set();
            }
          }};
}

}  // namespace infinitybatch::python
