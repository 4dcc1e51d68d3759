#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace infinitybatch::python {

namespace py = pybind11;

/// A reference to a Python object that C++ may copy and drop in any thread, with the GIL or
/// without. Copies share one Python reference, so that the garbage collector can count it.
class Held {
 public:
  Held() = default;
  /// The caller holds the GIL.
  explicit Held(py::object object)
      : object_(object.release().ptr(), [](PyObject* pointer) {
          if (Py_IsInitialized() == 0) return;
          const py::gil_scoped_acquire gil;
          const py::error_scope keep_error;  // dropping may happen while an exception is on its way
          Py_DECREF(pointer);
        }) {}

  /// Borrowed; null where nothing is held.
  PyObject* get() const noexcept { return object_.get(); }
  py::handle handle() const noexcept { return {object_.get()}; }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  std::shared_ptr<PyObject> object_;
};

}  // namespace infinitybatch::python
