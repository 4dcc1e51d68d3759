#include "bind.hpp"
#include "bind_offload.hpp"
#include "core/in_step.hpp"
#include "core/thread_context.hpp"
#include "garbage_collected.hpp"
#include "hidden_rows.hpp"
#include "left_places.hpp"
#include "options_argument.hpp"
#include "python_batch.hpp"
#include "python_model.hpp"
#include "step/mark_batch.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// 0 where there are none; that they differ is for Wrap::forward to say.
int64_t rows_of(const Batch& inputs) {
  for (const Leaf& leaf : inputs.leaves()) {
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    if (leaf.batch_dim < leaf.tensor.dim()) return leaf.tensor.size(leaf.batch_dim);
  }
  return 0;
}

Reduce to_reduce(const std::optional<std::string>& name) {
  if (!name) return Reduce::none;
  return *name == "sum" ? Reduce::sum : Reduce::mean;
}

/// infinitybatch.wrap's engine: what a module is stands in wrap.py.
class PyWrap {
 public:
  PyWrap(const py::object& model, const py::object& forward, const py::object& agree,
         const std::optional<std::string>& reduce, std::optional<int64_t> output_batch_dim,
         const py::kwargs& given) {
    WrapOptions own;
    own.reduce = to_reduce(reduce);
    own.output_batch_dim = output_batch_dim;
    own.on_backward_error = &throw_as_python;
    held_ = {Held(model), Held(forward), Held(agree)};
    own.left_places = [held = held_[0]] {
      const py::gil_scoped_acquire gil;
      return left_places(held.handle().attr("forward"));
    };
    if (!agree.is_none()) {
      own.agree = [held = held_[2]](const std::exception_ptr& error) {
        const py::gil_scoped_acquire gil;
        held.handle()(error != nullptr);
      };
      own.begin = [held = held_[2]](bool in_one) {
        const py::gil_scoped_acquire gil;
        return held.handle().attr("begin")(in_one).cast<bool>();
      };
    }
    Options options = to_options(given, held_);
    batch_dim_ = std::exchange(options.batch_dim, std::nullopt);  // of arguments, as they come here
    Model described = model_of(held_[0], held_[1], Outputs::kept, options.static_graph);
    wrap_ = std::make_unique<Wrap>(std::move(described), std::move(options), std::move(own));
  }

  py::object forward(const py::tuple& arguments, const py::dict& keywords) {
    torch::PyWarningHandler warnings;  // torch's warnings become Python's
    try {
      Batch inputs = to_batch(py::make_tuple(arguments, keywords), Side::differentiated, "inputs");
      for (Leaf& leaf : inputs.leaves()) {
        if (leaf.tensor.defined() && leaf.tensor.dim() == 0) leaf.batch_dim = Leaf::kShared;
      }
      if (batch_dim_) inputs = mark_inputs(std::move(inputs), *batch_dim_, /*depth=*/1);
      for (const auto& given : {py::object(arguments), py::object(keywords)}) {
        refuse_hidden_rows(given, inputs, rows_of(inputs), "inputs");
      }
      Batch outputs;
      {
        const py::gil_scoped_release no_gil;
        outputs = wrap_->forward(inputs);
        inputs = Batch();
      }
      if (const auto report = wrap_->last_report()) tell(*report);
      return to_python(outputs);
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  }

  /// Tells once of each attribute that a loss would find one micro-batch's tensor in.
  void tell(const WrapReport& report) {
    for (const std::string& attribute : report.left_on_module) {
      if (!told_.insert(attribute).second) continue;
      const std::string text =
          "IB102: forward leaves a tensor in '" + attribute +
          "', which is no output and could not be joined from micro-batches (it has no row for "
          "each sample, say). Whoever reads it finds the last micro-batch's alone: return it as an "
          "output (reduce= says what becomes of one number)";
      py::object category = py::module_::import("infinitybatch.errors").attr("LeftTensorNotice");
      // Wrapped.forward, and two frames of nn.Module, are called by the user's own line.
      constexpr Py_ssize_t kCaller = 4;
      if (PyErr_WarnEx(category.ptr(), text.c_str(), kCaller) != 0) throw py::error_already_set();
    }
  }

  std::optional<WrapReport> last_report() const { return wrap_->last_report(); }

  /// For the garbage collector: a module may well hold what wraps it.
  int visit(visitproc visit, void* arg) const {
    for (const Held& object : held_) Py_VISIT(object.get());
    return 0;
  }
  void clear() {
    held_.clear();
    wrap_.reset();
  }

 private:
  std::vector<Held> held_;
  std::set<std::string> told_;
  std::optional<BatchDim> batch_dim_;
  std::unique_ptr<Wrap> wrap_;
};

void bind_wrap_report(py::module_& module) {
  py::class_<WrapReport> type(module, "WrapReport", "What the last call of a wrapped module did.");
  bind_offload(type);
  bind_graph_bytes(type, "call");
  type.def_readonly("micro_batch_sizes", &WrapReport::micro_batch_sizes, "In the order they ran.")
      .def_readonly("retained", &WrapReport::retained,
                    "Micro-batches that keep their graph and need no second forward.")
      .def_readonly("strategy", &WrapReport::strategy,
                    "\"replay\" (each forward ran once), \"rerun\" (backward runs some again), "
                    "\"cut\" (ops of the model see the whole batch), \"forward\" (no gradient "
                    "wanted) or \"native\".")
      .def_readonly(
          "strategy_reason", &WrapReport::strategy_reason,
          "Why forwards run twice; of a model that is cut which boundary activations are kept, and "
          "why the others are computed again or offloaded; under a plan with offload=\"always\" "
          "else why graphs are offloaded or not; empty where there is nothing to say.")
      .def_readonly("left_on_module", &WrapReport::left_on_module,
                    "Attributes in which each micro-batch left another tensor that is no output "
                    "and could not be joined: whoever reads one finds the last micro-batch's "
                    "alone.")
      .def_readonly("memory_budget", &WrapReport::memory_budget, "In bytes, or None.")
      .def_readonly("predicted_peak_bytes", &WrapReport::predicted_peak_bytes,
                    "In bytes; None until it is known what comes between forward and backward.")
      .def_readonly("peak_bytes", &WrapReport::peak_bytes,
                    "The most that tensors occupied since the call began; 0 without a budget.")
      .def_readonly("restarts", &WrapReport::restarts,
                    "How often forward or backward began again after running out of memory.")
      .def("__repr__", [](const WrapReport& self) {
        std::string text = "<WrapReport: " + self.strategy + ", " +
                           std::to_string(self.micro_batch_sizes.size()) + " micro-batches, " +
                           std::to_string(self.retained) + " retained";
        if (self.memory_budget) {
          text += ", peak " + format_bytes(self.peak_bytes) + " of " +
                  format_bytes(*self.memory_budget);
        }
        return text + ">";
      });
}

}  // namespace

void bind_wrap(py::module_& module) {
  bind_wrap_report(module);
  module.def(
      "_in_step",
      [] {
        if (InStep::is()) ThreadContext::get().met_wrapped = true;
        return InStep::is();
      },
      "Whether this thread runs a step, or a call of a wrapped module: whoever asks, a wrapped "
      "part, "
      "computes plainly then.");
  module.def(
      "_sees_all", [] { return ThreadContext::get().sees_all; },
      "Whether the forward that runs in this thread sees all samples, and nobody joins outputs.");
  py::class_<PyWrap>(module, "Wrap", "infinitybatch.wrap without its manners.",
                     garbage_collected<PyWrap>())
      .def(py::init<const py::object&, const py::object&, const py::object&,
                    const std::optional<std::string>&, std::optional<int64_t>, const py::kwargs&>(),
           py::arg("model"), py::arg("forward"), py::arg("agree"), py::arg("reduce"),
           py::arg("output_batch_dim"))
      .def("forward", &PyWrap::forward, py::arg("arguments"), py::arg("keywords"))
      .def("last_report", &PyWrap::last_report);
}

}  // namespace infinitybatch::python
