#include "bind.hpp"
#include "bind_offload.hpp"
#include "budget_argument.hpp"
#include "garbage_collected.hpp"
#include "hidden_rows.hpp"
#include "offload_argument.hpp"
#include "python_model.hpp"
#include "python_source.hpp"
#include "signals.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/step/bench.hpp>
#include <infinitybatch/step/verify.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdio>
#include <type_traits>
#include <utility>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// By hand: std::variant's own conversion wants types that can be made of nothing.
Loss to_loss(const py::object& loss) {
  if (py::isinstance<CoupledLoss>(loss)) return loss.cast<CoupledLoss>();
  return loss.cast<SeparableLoss>();
}

/// infinitybatch.VirtualBatch without its manners: checks of arguments stand in virtual_batch.py.
class PyVirtualBatch {
 public:
  PyVirtualBatch(const py::object& model, const py::object& loss, const py::object& budget,
                 std::optional<int64_t> micro_batch_size, int64_t retained_micro_batches,
                 bool exact_coupling, bool keep_outputs, const py::object& on_micro_batch,
                 const py::object& loss_scale, bool use_tapes, bool static_graph,
                 std::optional<int64_t> checkpoint_segments, const py::object& offload,
                 bool match_native_rng) {
    Options options;
    if (!budget.is_none()) options.memory_budget = to_budget(budget, "memory_budget");
    options.micro_batch_size = micro_batch_size;
    options.retained_micro_batches = retained_micro_batches;
    options.use_tapes = use_tapes;
    options.static_graph = static_graph;
    options.checkpoint_segments = checkpoint_segments;
    options.offload = to_offload(offload);
    options.match_native_rng = match_native_rng;
    options.batch_coupling = exact_coupling ? BatchCoupling::exact : BatchCoupling::per_micro_batch;
    options.keep_outputs = keep_outputs;
    options.interrupt = &check_signals;
    if (!on_micro_batch.is_none()) {
      options.on_micro_batch = [held = hold(on_micro_batch)](const MicroBatch& micro_batch) {
        const py::gil_scoped_acquire gil;
        held.handle()(micro_batch.begin, micro_batch.end, to_python(micro_batch.outputs),
                      to_python(micro_batch.targets));
      };
    }
    if (!loss_scale.is_none()) {
      options.loss_scale = [held = hold(loss_scale)] {
        const py::gil_scoped_acquire gil;
        return held.handle()().cast<at::Tensor>();
      };
    }
    const Held view = hold(model);
    Loss value = to_loss(loss);
    const bool whole = std::holds_alternative<CoupledLoss>(value);
    const Outputs use = keep_outputs ? Outputs::kept
                        : whole      ? Outputs::for_one_loss
                                     : Outputs::read_by_parts;
    setup_ = std::make_unique<Setup>(
        Setup{model_of(view, hold(model.attr("forward")), use), std::move(value), options});
    batch_ = std::make_unique<VirtualBatch>(setup_->model, setup_->loss, setup_->options);
  }

  StepReport backward(const py::object& inputs, const py::object& targets) {
    return run(inputs, targets, [&](const BatchSource& left, const BatchSource& right) {
      return batch_->backward(left, right);
    });
  }

  Plan plan(const py::object& inputs, const py::object& targets) {
    return run(inputs, targets, [&](const BatchSource& left, const BatchSource& right) {
      return batch_->plan(left, right);
    });
  }

  VerifyReport verify(const py::object& inputs, const py::object& targets,
                      const std::optional<CoupledLoss>& native) {
    return run(inputs, targets, [&](const BatchSource& left, const BatchSource& right) {
      return infinitybatch::verify(setup_->model, setup_->loss, left, right, setup_->options,
                                   native);
    });
  }

  BenchReport bench(const py::object& inputs, const py::object& targets,
                    const std::optional<CoupledLoss>& native, int64_t rounds, double seconds) {
    return run(inputs, targets, [&](const BatchSource& left, const BatchSource& right) {
      return infinitybatch::bench(setup_->model, setup_->loss, left, right, setup_->options,
                                  {rounds, seconds}, native);
    });
  }

  /// For the garbage collector: a model may well hold its own VirtualBatch.
  int visit(visitproc visit, void* arg) const {
    for (const Held& object : held_) Py_VISIT(object.get());
    return 0;
  }
  void clear() {
    held_.clear();
    batch_.reset();
    setup_.reset();
  }

 private:
  Held hold(const py::object& object) {
    held_.emplace_back(object);
    return held_.back();
  }

  template <typename Step>
  std::invoke_result_t<Step, const BatchSource&, const BatchSource&> run(const py::object& inputs,
                                                                         const py::object& targets,
                                                                         Step step) {
    struct Busy {
      explicit Busy(std::atomic<bool>& flag) : flag(flag) {
        if (flag.exchange(true)) {
          throw StateError(
              "this VirtualBatch is running a step already, in another thread or around this call; "
              "give each thread its own model and VirtualBatch");
        }
      }
      ~Busy() { flag = false; }
      std::atomic<bool>& flag;
    };
    const Busy busy(busy_);
    torch::PyWarningHandler warnings;  // torch's warnings become Python's
    try {
      StepSide left = to_step_side(inputs, "inputs");
      StepSide right = to_step_side(targets, "targets");
      if (!left.has_rows()) {
        refuse_hidden_rows(inputs, left.whole, /*samples=*/0, "inputs");
        batch_size(left.whole, "inputs");  // throws: there is no tensor
      }
      if (!right.has_rows()) {
        refuse_hidden_rows(targets, right.whole, left.source->size, "targets");
        right.source = BatchSource{left.source->size,
                                   [whole = right.whole](int64_t, int64_t) { return whole; },
                                   "none", Dims(), /*uniform=*/true};
      }
      const py::gil_scoped_release no_gil;
      return step(*left.source, *right.source);
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  }

  struct Setup {
    Model model;
    Loss loss;
    Options options;
  };

  std::vector<Held> held_;
  std::unique_ptr<Setup> setup_;
  std::unique_ptr<VirtualBatch> batch_;
  std::atomic<bool> busy_ = false;
};

std::string sizes(const std::vector<int64_t>& all) {
  std::string text;
  for (size_t i = 0; i < all.size();) {
    size_t end = i;
    while (end < all.size() && all[end] == all[i]) ++end;
    text += (i == 0 ? "" : ", ") + std::to_string(all[i]);
    if (end - i > 1) text += " (" + std::to_string(end - i) + " times)";
    i = end;
  }
  return "[" + text + "]";
}

std::string describe_step(const StepReport& report) {
  char number[32];
  std::snprintf(number, sizeof number, "%.6g",
                report.loss.to(at::kCPU, at::kDouble).item<double>());
  std::string text =
      "<StepReport: loss " + std::string(number) + ", peak " + format_bytes(report.peak_bytes);
  if (report.memory_budget) text += " of " + format_bytes(*report.memory_budget);
  std::snprintf(number, sizeof number, "%.3g s", report.seconds);
  text += ", micro-batches " + sizes(report.micro_batch_sizes) + ", " + number;
  if (report.restarts > 0) text += ", " + std::to_string(report.restarts) + " restarts";
  return text + ">";
}

void bind_step_report(py::module_& module) {
  py::class_<StepReport> type(module, "StepReport", "What one step did.");
  bind_offload(type);
  type.def_readonly("loss", &StepReport::loss,
                    "The whole batch's loss: detached, 0-dimensional, on the model's device.")
      .def_property_readonly(
          "outputs",
          [](const StepReport& self) {
            return self.outputs ? to_python(*self.outputs) : py::object(py::none());
          },
          "What the model returned for all samples, detached; None without `keep_outputs`.")
      .def_readonly("peak_bytes", &StepReport::peak_bytes,
                    "The most that tensors occupied on the device, in bytes.")
      .def_readonly("memory_budget", &StepReport::memory_budget, "In bytes, or None.")
      .def_readonly("predicted_peak_bytes", &StepReport::predicted_peak_bytes, "In bytes, or None.")
      .def_readonly("micro_batch_sizes", &StepReport::micro_batch_sizes, "In the order they ran.")
      .def_readonly("seconds", &StepReport::seconds, "Wall clock time.")
      .def_readonly("restarts", &StepReport::restarts,
                    "How often the step began again with a smaller plan.")
      .def_readonly(
          "strategy", &StepReport::strategy,
          "\"stream\", \"replay\" (a coupled loss, each forward ran once), \"rerun\" (some "
          "forwards ran twice), \"cut\" (layers of the model see the whole batch) or "
          "\"checkpoint\" (the graph of one micro-batch was never there as a whole).")
      .def_readonly("strategy_reason", &StepReport::strategy_reason,
                    "Why forwards ran twice; empty where they did not.")
      .def("__repr__", &describe_step);
}

}  // namespace

void bind_virtual_batch(py::module_& module) {
  bind_step_report(module);
  py::class_<PyVirtualBatch>(module, "VirtualBatch", garbage_collected<PyVirtualBatch>())
      .def(py::init<const py::object&, const py::object&, const py::object&, std::optional<int64_t>,
                    int64_t, bool, bool, const py::object&, const py::object&, bool, bool,
                    std::optional<int64_t>, const py::object&, bool>(),
           py::kw_only(), py::arg("model"), py::arg("loss"), py::arg("memory_budget"),
           py::arg("micro_batch_size"), py::arg("retained_micro_batches"),
           py::arg("exact_coupling"), py::arg("keep_outputs"), py::arg("on_micro_batch"),
           py::arg("loss_scale"), py::arg("use_tapes"), py::arg("static_graph"),
           py::arg("checkpoint_segments"), py::arg("offload"), py::arg("match_native_rng"))
      .def("backward", &PyVirtualBatch::backward, py::arg("inputs"), py::arg("targets"))
      .def("verify", &PyVirtualBatch::verify, py::arg("inputs"), py::arg("targets"),
           py::arg("native"))
      .def("bench", &PyVirtualBatch::bench, py::arg("inputs"), py::arg("targets"),
           py::arg("native"), py::arg("rounds"), py::arg("seconds"))
      .def("plan", &PyVirtualBatch::plan, py::arg("inputs"), py::arg("targets"));
}

}  // namespace infinitybatch::python
