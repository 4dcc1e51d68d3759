// C++ exceptions as Python exceptions, and Python's out-of-memory errors as the planner knows them.
#include "bind.hpp"
#include "core/engine_error.hpp"
#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"

#include <infinitybatch/core/errors.hpp>

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <optional>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// The module infinitybatch.errors, which defines the classes. Lives as long as the process.
py::handle error_classes() {
  static const py::handle module = py::module_::import("infinitybatch.errors").release();
  return module;
}

void translate(std::exception_ptr pointer);

/// What the error was thrown because of, as Python says it below `__cause__`.
py::object cause_of(const Error& error) {
  const auto* nested = dynamic_cast<const std::nested_exception*>(&error);
  if (nested == nullptr || !nested->nested_ptr()) return {};
  try {
    nested->rethrow_nested();
  } catch (const py::error_already_set& cause) {
    py::object value = cause.value();
    if (cause.trace()) PyException_SetTraceback(value.ptr(), cause.trace().ptr());
    return value;
  } catch (...) {
  }
  // One of C++: its translation leaves it in the interpreter.
  translate(nested->nested_ptr());
  if (PyErr_Occurred() == nullptr) return {};
  const py::error_already_set cause;
  return cause.value();
}

template <typename... Args>
void raise(const char* name, const Error& error, Args&&... args) {
  const py::object type = error_classes().attr(name);
  const py::object instance =
      type(std::string(error.what_without_backtrace()), std::forward<Args>(args)...);
  if (py::object cause = cause_of(error)) {
    PyException_SetCause(instance.ptr(), cause.release().ptr());
  }
  PyErr_SetObject(type.ptr(), instance.ptr());
}

/// pybind11 gives every exception here before its own translators; what is not caught goes on.
void translate(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const BudgetExceeded& error) {
    raise("BudgetExceeded", error, error.needed(), error.limit(),
          error.smallest_feasible() ? py::cast(*error.smallest_feasible()) : py::none());
  } catch (const OffloadError& error) {
    raise("OffloadError", error, error.needed(), error.available());
  } catch (const CouplingError& error) {
    raise("CouplingError", error, error.op());
  } catch (const BatchError& error) {
    raise("BatchError", error);
  } catch (const InvalidArgument& error) {
    raise("InvalidArgument", error);
  } catch (const InvalidType& error) {
    raise("InvalidType", error);
  } catch (const Unsupported& error) {
    raise("Unsupported", error);
  } catch (const StateError& error) {
    raise("StateError", error);
  } catch (const Error& error) {
    raise("Error", error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(pointer);
  } catch (const torch::PyTorchError&) {
    torch::translate_exception_to_python(pointer);
  } catch (const python_error&) {
    torch::translate_exception_to_python(pointer);
  }
}

py::handle torch_out_of_memory() {
  static const py::handle type =
      py::module_::import("torch").attr("OutOfMemoryError").cast<py::object>().release();
  return type;
}

std::string text_of(const py::object& error) {
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(error.ptr()));
  const char* const utf8 = text ? PyUnicode_AsUTF8(text.ptr()) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_Clear();
  return {};
}

/// Whether `error`, or what it says to have been caused by, is a torch.OutOfMemoryError; or it, or
/// what was being handled when it was raised, tells a refusal of ours. Another's that merely was
/// being handled does not count: a step may be the answer to a native one.
bool says_out_of_memory(py::object error) {
  bool caused = true;
  for (int depth = 0; depth < 16 && error && !error.is_none(); ++depth) {
    const bool out_of_memory =
        PyErr_GivenExceptionMatches(error.ptr(), torch_out_of_memory().ptr()) != 0;
    if (out_of_memory && caused) return true;
    if (tells_refusal(text_of(error))) return true;
    auto cause = py::reinterpret_steal<py::object>(PyException_GetCause(error.ptr()));
    caused = caused && cause && !cause.is_none();
    error = cause && !cause.is_none()
                ? std::move(cause)
                : py::reinterpret_steal<py::object>(PyException_GetContext(error.ptr()));
  }
  return false;
}

/// A python_error may leave the Python exception in the interpreter, or have it in both places
/// (after the autograd engine): takes it into the C++ exception, so that Python code can run.
/// Translation puts it back.
void keep_python_error(const std::exception_ptr& pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (python_error& error) {
    const py::gil_scoped_acquire gil;
    error.persist();
    PyErr_Clear();
  } catch (...) {
  }
}

bool is_python_out_of_memory(const std::exception_ptr& pointer) {
  const py::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(pointer);
  } catch (py::error_already_set& error) {
    return says_out_of_memory(error.value());
  } catch (python_error& error) {
    keep_python_error(pointer);
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    return says_out_of_memory(py::reinterpret_borrow<py::object>(error.value));
  } catch (...) {
    return false;
  }
}

}  // namespace

void throw_as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    const py::gil_scoped_acquire gil;
    translate(error);
    throw py::error_already_set();
  } catch (...) {
  }
}

void bind_errors(py::module_&) {
  error_classes();
  torch_out_of_memory();
  py::register_local_exception_translator(&translate);
  register_exception_keeper(&keep_python_error);
  register_engine_thrower(&throw_as_python);
  register_out_of_memory(&is_python_out_of_memory);
}

}  // namespace infinitybatch::python
