#include "plain_description.hpp"

#include "core/tensor_parts.hpp"
#include "core/unwatched.hpp"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch::python {
namespace {

constexpr int kDeepestDescribed = 6;
constexpr size_t kMostDescribed = 1024;

std::string describe_tensor(const at::Tensor& tensor) {
  std::ostringstream out;
  out << "tensor " << tensor.scalar_type();
  if (!tensor.is_nested()) out << " " << tensor.sym_sizes();
  const Unwatched unwatched;
  for (const at::Tensor& part : parts_of(tensor).tensors) {
    if (part.is_meta()) continue;
    const at::Tensor here = part.detach().to(at::kCPU).contiguous();
    const auto* data = static_cast<const char*>(here.const_data_ptr());
    const std::string_view bytes(data, data == nullptr ? 0 : static_cast<size_t>(here.nbytes()));
    out << " " << here.sizes() << " " << std::hash<std::string_view>()(bytes);
  }
  return out.str();
}

bool is_deque(PyObject* value) {
  static PyObject* const deque =
      py::module_::import("collections").attr("deque").cast<py::object>().release().ptr();
  return reinterpret_cast<PyObject*>(Py_TYPE(value)) == deque;
}

void describe(PyObject* value, int depth, std::string& out) {
  if (value == Py_None || PyBool_Check(value) || PyLong_Check(value) || PyFloat_Check(value) ||
      PyUnicode_Check(value)) {
    out += py::repr(value).cast<std::string>();
    return;
  }
  if (PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    out += describe_tensor(THPVariable_Unpack(value));
    return;
  }
  out += Py_TYPE(value)->tp_name;
  if (depth == kDeepestDescribed) return;
  size_t items = 0;
  if (PyDict_Check(value)) {
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    out += "{";
    for (Py_ssize_t at = 0;
         PyDict_Next(value, &at, &key, &item) != 0 && ++items <= kMostDescribed;) {
      describe(key, depth + 1, out);
      out += ": ";
      describe(item, depth + 1, out);
      out += ", ";
    }
    out += "}";
    return;
  }
  if (PyList_Check(value) || PyTuple_Check(value) || PyAnySet_Check(value) || is_deque(value)) {
    out += " of " + std::to_string(PyObject_Size(value)) + " [";
    std::vector<std::string> each;
    for (const py::handle item : py::reinterpret_borrow<py::iterable>(value)) {
      if (++items > kMostDescribed) break;
      describe(item.ptr(), depth + 1, each.emplace_back());
    }
    if (PyAnySet_Check(value)) std::sort(each.begin(), each.end());
    for (const std::string& text : each) out += text + ", ";
    out += "]";
    return;
  }
  if (PyType_Check(value) || Py_TYPE(value)->tp_dictoffset == 0) return;
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
  if (!attributes) return PyErr_Clear();
  describe(attributes.ptr(), depth + 1, out);
}

}  // namespace

std::string description_of(PyObject* value) {
  std::string text;
  describe(value, 0, text);
  return text;
}

}  // namespace infinitybatch::python
