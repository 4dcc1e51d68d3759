#include "bind.hpp"
#include "budget_argument.hpp"
#include "memory/cpu_allocator.hpp"
#include "memory/failure_injection.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// A scope of C++ as a context manager; entered and left in one thread.
template <typename Scope>
class Context {
 public:
  template <typename... Args>
  void enter(Args... args) {
    if (scope_) throw StateError("this context manager is entered already; make another one");
    scope_ = std::make_unique<Scope>(args...);
  }
  void exit() { scope_.reset(); }
  const Scope* scope() const { return scope_.get(); }

 private:
  std::unique_ptr<Scope> scope_;
};

struct PyLimit : Context<memory::Limit> {
  int64_t bytes = 0;
  int64_t refused = 0;
};

struct PyPeak : Context<memory::PeakScope> {
  at::Device device = at::kCPU;
  int64_t peak = 0;
};

struct PyFailure : Context<memory::FailAllocation> {
  int64_t n = 0;
  int64_t seen = 0;
  bool failed = false;
};

std::string optional_bytes(const std::optional<int64_t>& bytes) {
  return bytes ? format_bytes(*bytes) : "None";
}

void bind_statistics(py::module_& memory) {
  py::class_<memory::Statistics>(memory, "Statistics",
                                 "What tensors occupy on one device, in bytes.")
      .def_readonly("live", &memory::Statistics::live, "Occupied now.")
      .def_readonly("peak", &memory::Statistics::peak, "The most since `reset_peak`.")
      .def_readonly("reserved", &memory::Statistics::reserved,
                    "Held by the allocator: live, and free for the next tensors.")
      .def_readonly("limit", &memory::Statistics::limit, "In force in this thread (CPU only).")
      .def_readonly("total", &memory::Statistics::total, "What the device has.")
      .def("__repr__", [](const memory::Statistics& self) {
        return "Statistics(live=" + format_bytes(self.live) + ", peak=" + format_bytes(self.peak) +
               ", reserved=" + format_bytes(self.reserved) +
               ", limit=" + optional_bytes(self.limit) + ", total=" + format_bytes(self.total) +
               ")";
      });
  memory.def("stats", &memory::stats, py::arg("device"));
  memory.def("reset_peak", &memory::reset_peak, py::arg("device"));
  memory.def("empty_cache", &memory::empty_cache);
  memory.def("available", &memory::available, py::arg("device"));
  memory.def(
      "describe_cpu_allocator", [] { return memory::describe(memory::cpu_allocator_state()); },
      "Whether torch's CPU allocator is ours, in one sentence, with a way out where it is not.");
}

void bind_limit(py::module_& memory) {
  py::class_<PyLimit>(memory, "Limit",
                      "A context that limits this thread's CPU allocations. Made by `limit`.")
      .def(py::init([](const py::object& bytes) {
             PyLimit limit;
             limit.bytes = to_budget(bytes, "the limit").resolve(at::kCPU);
             return limit;
           }),
           py::arg("bytes"))
      .def_readonly("bytes", &PyLimit::bytes, "What may be live.")
      .def_property_readonly(
          "refused",
          [](const PyLimit& self) { return self.scope() ? self.scope()->refused() : self.refused; },
          "What the last refused allocation would have made live; 0 for none.")
      .def(
          "__enter__",
          [](PyLimit& self) -> PyLimit& {
            self.enter(self.bytes);
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](PyLimit& self, const py::args&) {
        if (self.scope()) self.refused = self.scope()->refused();
        self.exit();
      });
}

void bind_peak(py::module_& memory) {
  py::class_<PyPeak>(memory, "PeakScope",
                     "A context that sees the peak of live bytes. Made by `peak`.")
      .def(py::init([](at::Device device) {
             PyPeak peak;
             peak.device = device;
             return peak;
           }),
           py::arg("device"))
      .def_property_readonly(
          "peak",
          [](const PyPeak& self) { return self.scope() ? self.scope()->peak() : self.peak; })
      .def(
          "__enter__",
          [](PyPeak& self) -> PyPeak& {
            self.enter(self.device);
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](PyPeak& self, const py::args&) {
        if (self.scope()) self.peak = self.scope()->peak();
        self.exit();
      });
}

void bind_failure(py::module_& memory) {
  py::class_<PyFailure>(memory, "FailAllocation",
                        "A context in which one allocation fails. Made by `fail_allocation`.")
      .def(py::init([](std::optional<int64_t> n) {
             PyFailure failure;
             failure.n = n.value_or(memory::FailAllocation::kNever);
             return failure;
           }),
           py::arg("n") = py::none())
      .def_property_readonly(
          "seen",
          [](const PyFailure& self) { return self.scope() ? self.scope()->seen() : self.seen; })
      .def_property_readonly(
          "failed",
          [](const PyFailure& self) { return self.scope() ? self.scope()->failed() : self.failed; })
      .def(
          "__enter__",
          [](PyFailure& self) -> PyFailure& {
            self.enter(self.n);
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](PyFailure& self, const py::args&) {
        if (self.scope()) {
          self.seen = self.scope()->seen();
          self.failed = self.scope()->failed();
        }
        self.exit();
      });
}

}  // namespace

memory::Budget to_budget(py::handle value, const char* name) {
  if (PyUnicode_Check(value.ptr()) != 0) return {value.cast<std::string>(), name};
  if (PyFloat_Check(value.ptr()) != 0) return {value.cast<double>(), name};
  if (PyBool_Check(value.ptr()) == 0 && PyIndex_Check(value.ptr()) != 0) {
    int overflow = 0;
    const py::object whole = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!whole) throw py::error_already_set();
    const int64_t bytes = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
    if (overflow == 0) return {bytes, name};
    throw InvalidArgument(std::string(name) +
                          " is a whole number of more than 64 bits; it is a "
                          "number of bytes, 1 to 2^63 - 1");
  }
  throw InvalidType(std::string(name) +
                    " must be a number of bytes, text such as \"512MiB\", a fraction of the device "
                    "(0.8) or \"auto\", not " +
                    Py_TYPE(value.ptr())->tp_name);
}

void bind_memory(py::module_& module) {
  py::module_ memory = module.def_submodule("memory");
  bind_statistics(memory);
  bind_limit(memory);
  bind_peak(memory);
  bind_failure(memory);
}

}  // namespace infinitybatch::python
