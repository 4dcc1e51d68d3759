#include "bind.hpp"
#include "garbage_collected.hpp"
#include "hidden_rows.hpp"
#include "loss_argument.hpp"
#include "options_argument.hpp"
#include "python_model.hpp"
#include "python_source.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/step/bench.hpp>
#include <infinitybatch/step/verify.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// infinitybatch.VirtualBatch without its manners: checks of arguments stand in virtual_batch.py.
class PyVirtualBatch {
 public:
  PyVirtualBatch(const py::object& model, const py::object& loss, const py::kwargs& given) {
    Options options = to_options(given, held_);
    batch_dim_ = std::exchange(options.batch_dim, std::nullopt);  // of arguments, as they come here
    const Held view = hold(model);
    Loss value = to_loss(loss);
    const bool whole = std::holds_alternative<CoupledLoss>(value);
    const Outputs use = options.keep_outputs ? Outputs::kept
                        : whole              ? Outputs::for_one_loss
                                             : Outputs::read_by_parts;
    Model described = model_of(view, hold(model.attr("forward")), use, options.static_graph);
    setup_ =
        std::make_unique<Setup>(Setup{std::move(described), std::move(value), std::move(options)});
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
      const Sides sides = to_sides(inputs, targets, batch_dim_, setup_->loss);
      const py::gil_scoped_release no_gil;
      return step(sides.inputs, sides.targets);
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
  std::optional<BatchDim> batch_dim_;
  std::unique_ptr<Setup> setup_;
  std::unique_ptr<VirtualBatch> batch_;
  std::atomic<bool> busy_ = false;
};

}  // namespace

void bind_virtual_batch(py::module_& module) {
  module.def("_options", &option_defaults, "For tests: every option, with its default.");
  py::class_<PyVirtualBatch>(module, "VirtualBatch", garbage_collected<PyVirtualBatch>())
      .def(py::init<const py::object&, const py::object&, const py::kwargs&>(), py::arg("model"),
           py::arg("loss"))
      .def("backward", &PyVirtualBatch::backward, py::arg("inputs"), py::arg("targets"))
      .def("verify", &PyVirtualBatch::verify, py::arg("inputs"), py::arg("targets"),
           py::arg("native"))
      .def("bench", &PyVirtualBatch::bench, py::arg("inputs"), py::arg("targets"),
           py::arg("native"), py::arg("rounds"), py::arg("seconds"))
      .def("plan", &PyVirtualBatch::plan, py::arg("inputs"), py::arg("targets"));
}

}  // namespace infinitybatch::python
