#include "leaves_in.hpp"

#include "module_attributes.hpp"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

namespace infinitybatch::python {
namespace {

constexpr int kDeepestLeaf = 32;
constexpr size_t kMostHolders = 4096;

bool is_parameter(PyObject* tensor) {
  static PyObject* const type =
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  return PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject*>(type));
}

class LeafWalk {
 public:
  void visit(PyObject* value, int depth) {
    if (is_tensor(value)) return tensor(value);
    const bool holds = PyDict_Check(value) || PyList_Check(value) || PyTuple_Check(value) ||
                       PyAnySet_Check(value) || Py_TYPE(value)->tp_dictoffset != 0;
    if (!holds || PyType_Check(value) || PyModule_Check(value) || PyFunction_Check(value)) return;
    if (depth == kDeepestLeaf || seen_.size() == kMostHolders) return;
    if (!seen_.insert(value).second) return;
    if (PyDict_Check(value)) {
      PyObject* key = nullptr;
      PyObject* item = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) visit(item, depth + 1);
    } else if (PyList_Check(value) || PyTuple_Check(value) || PyAnySet_Check(value)) {
      for (const py::handle item : py::reinterpret_borrow<py::iterable>(value)) {
        visit(item.ptr(), depth + 1);
      }
    }
    if (Py_TYPE(value)->tp_dictoffset == 0) return;
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
    if (!attributes) return PyErr_Clear();
    visit(attributes.ptr(), depth + 1);
  }
  std::vector<PlainLeaf> take() { return std::move(found_); }

 private:
  void tensor(PyObject* value) {
    const at::Tensor& here = THPVariable_Unpack(value);
    if (!here.requires_grad() || !here.is_leaf() || !seen_.insert(value).second) return;
    found_.push_back({here, is_parameter(value)});
  }

  ska::flat_hash_set<PyObject*> seen_;
  std::vector<PlainLeaf> found_;
};

}  // namespace

std::vector<PlainLeaf> leaves_in(PyObject* value) {
  LeafWalk walk;
  if (value != nullptr) walk.visit(value, 0);
  return walk.take();
}

}  // namespace infinitybatch::python
