#pragma once

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// Makes a bound class known to Python's garbage collector: a module may well hold what holds it.
/// `T` has `int visit(visitproc, void*) const` and `void clear()` for the objects that it holds.
template <typename T>
pybind11::custom_type_setup garbage_collected() {
  return pybind11::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
      Py_VISIT(Py_TYPE(self));
#endif
      if (!pybind11::detail::is_holder_constructed(self)) return 0;
      return pybind11::cast<T&>(pybind11::handle(self)).visit(visit, arg);
    };
    type->tp_clear = [](PyObject* self) {
      pybind11::cast<T&>(pybind11::handle(self)).clear();
      return 0;
    };
  });
}

}  // namespace infinitybatch::python
