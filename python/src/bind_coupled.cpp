#include "bind.hpp"
#include "coupled/provisional.hpp"
#include "coupled/row_errors.hpp"
#include "module_walk.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/coupled/across_batch.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// Python's exceptions but those by which torch, Python and assertions complain of rows that do not
/// suit a function.
bool ends_the_step(const std::exception_ptr& exception) {
  const py::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(exception);
  } catch (const py::error_already_set& error) {
    return !(error.matches(PyExc_RuntimeError) || error.matches(PyExc_ValueError) ||
             error.matches(PyExc_AssertionError) || error.matches(PyExc_LookupError) ||
             error.matches(PyExc_ArithmeticError));
  } catch (...) {
    return false;
  }
}

/// As Python complains of None in the place of a tensor, and of names that are not there.
bool is_of_state(const std::exception_ptr& exception) {
  const py::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(exception);
  } catch (const py::error_already_set& error) {
    return error.matches(PyExc_TypeError) || error.matches(PyExc_AttributeError);
  } catch (...) {
    return false;
  }
}

/// For the form of its result alone: what it leaves in its closure, or on its object, is undone.
/// What ends the step leaves what it leaves natively.
py::object run_provisionally(const py::object& function, const py::tuple& arguments) {
  const PlainState before = held_state(function);
  try {
    py::object result = function(*arguments);
    before.restore();
    return result;
  } catch (const py::error_already_set&) {
    if (!ends_the_step(std::current_exception())) before.restore();
    throw;
  }
}

at::Tensor call_across_batch(const py::object& given, const py::args& inputs) {
  if (PyCallable_Check(given.ptr()) == 0) {
    throw InvalidType(std::string("the first argument of across_batch must be a function of the "
                                  "inputs that follow it, not ") +
                      Py_TYPE(given.ptr())->tp_name + ": across_batch(fn, x)");
  }
  std::vector<at::Tensor> tensors;
  for (const py::handle input : inputs) {
    if (!THPVariable_Check(input.ptr())) {
      throw InvalidType(
          "across_batch needs tensors whose first dimension is the batch; it was "
          "given a " +
          std::string(Py_TYPE(input.ptr())->tp_name));
    }
    tensors.push_back(THPVariable_Unpack(input.ptr()));
  }
  // The last holder may let go of it without the GIL.
  const std::shared_ptr<py::object> held(new py::object(given), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  const AcrossBatchFunction call = [held](const std::vector<at::Tensor>& all) {
    const py::gil_scoped_acquire gil;
    py::tuple arguments(all.size());
    for (size_t i = 0; i < all.size(); ++i) arguments[i] = py::cast(all[i]);
    const py::object result = coupled::ProvisionalRun::at_work()
                                  ? run_provisionally(*held, arguments)
                                  : (*held)(*arguments);
    if (!THPVariable_Check(result.ptr())) {
      throw InvalidType("the function of across_batch returned a " +
                        std::string(Py_TYPE(result.ptr())->tp_name) + "; it must return a tensor");
    }
    return THPVariable_Unpack(result.ptr());
  };
  const py::gil_scoped_release nogil;
  return across_batch(call, tensors);
}

}  // namespace

void bind_coupled(py::module_& module) {
  coupled::register_row_errors(&ends_the_step);
  coupled::register_state_errors(&is_of_state);
  module.def("across_batch", &call_across_batch, py::arg("function"),
             R"(An op of your own inside of a model that needs all samples at once.

Minibatch statistics, a balance term over experts, a contrastive head:

    def forward(self, x):
        spread = ib.across_batch(lambda all: all.std(0).mean().expand(len(all), 1), x)
        return self.head(torch.cat([x, spread], 1))

In ordinary runs this is `function(*inputs)`. Inside of a VirtualBatch step the function is given
the rows of the whole logical batch, and each micro-batch gets its rows of the result; gradients
of inputs and of parameters that the function uses are exact. Inputs, result and graph of the whole
batch are held meanwhile.

Args:
    function: from tensors of shape (rows, ...) to one of shape (rows, ...). It depends on them and
        on parameters only: other tensors that it captures, and numbers made of `len(x)` outside of
        it, are those of the first micro-batch. Before all samples are known it runs on the rows of
        each micro-batch for a result of the right shape; where it fails there, on those rows
        repeated. It may draw random numbers and change what it is given in place.
    inputs: tensors whose first dimension is the batch.

Raises:
    InvalidArgument: the function returned another number of rows.
    CouplingError: the function fails on any rows of a micro-batch, repeated or not, or it draws
        random numbers under match_native_rng.)");
}

}  // namespace infinitybatch::python
