// What subclasses of tensors that answer operators themselves (DTensor, jagged nested tensors)
// wrap, as they tell torch.compile.
#include "bind.hpp"
#include "core/tensor_parts.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace infinitybatch::python {
namespace {

std::optional<std::vector<at::Tensor>> wrapped_in(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_error;
  try {
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    if (!py::hasattr(object, "__tensor_flatten__")) return std::nullopt;
    std::vector<at::Tensor> inner;
    const py::tuple told = object.attr("__tensor_flatten__")();
    for (const py::handle name : told[0]) {
      const py::object each = py::getattr(object, name);
      if (THPVariable_Check(each.ptr())) inner.push_back(THPVariable_Unpack(each.ptr()));
    }
    return inner;
  } catch (py::error_already_set&) {
    return std::nullopt;  // half made
  }
}

}  // namespace

void register_wrapped_tensors() {
  infinitybatch::register_wrapped_tensors(&wrapped_in);
}

}  // namespace infinitybatch::python
