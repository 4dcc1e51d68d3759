#include "bind.hpp"
#include "garbage_collected.hpp"
#include "held.hpp"
#include "module_attributes.hpp"
#include "signals.hpp"

#include <infinitybatch/train/trainer.hpp>

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace infinitybatch::python {
namespace {

/// A name that is an argument of a template, so that each has one interned string.
template <size_t kLength>
struct Name {
  // NOLINTNEXTLINE(google-explicit-constructor): call<"step"> reads as it should
  constexpr Name(const char (&given)[kLength]) { std::copy_n(given, kLength, text); }
  char text[kLength] = {};
};

template <typename T>
py::object to_object(T&& value) {
  if constexpr (std::is_base_of_v<py::handle, std::decay_t<T>>) {
    return py::reinterpret_borrow<py::object>(value);
  } else {
    return py::cast(std::forward<T>(value));
  }
}

/// What the loop is made of, in Python: infinitybatch._training.Parts. The loop holds the GIL; a
/// step lets go of it.
class Parts {
 public:
  explicit Parts(Held parts) : parts_(std::move(parts)) {}

  /// Ten of these are made in each step: no string, bound method or tuple of arguments is.
  template <Name kMethod, typename... Arguments>
  py::object call(Arguments&&... arguments) const {
    static PyObject* const name = interned(kMethod.text);
    constexpr size_t kCount = sizeof...(Arguments) + 1;
    const std::array<py::object, kCount> held{py::reinterpret_borrow<py::object>(parts_.handle()),
                                              to_object(std::forward<Arguments>(arguments))...};
    std::array<PyObject*, kCount + 1> given{};  // the first is the callee's to write
    for (size_t i = 0; i < kCount; ++i) given[i + 1] = held[i].ptr();
    return owned(PyObject_VectorcallMethod(name, given.data() + 1,
                                           kCount | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  PyObject* get() const noexcept { return parts_.get(); }

 private:
  Held parts_;
};
using SharedParts = std::shared_ptr<Parts>;

class PyLoader final : public Loader {
 public:
  explicit PyLoader(SharedParts parts) : parts_(std::move(parts)) {}

  void begin(int64_t epoch, int64_t skip) override { parts_->call<"begin">(epoch, skip); }
  std::optional<LogicalBatch> next() override {
    py::object batch = parts_->call<"next">();
    if (batch.is_none()) return std::nullopt;
    LogicalBatch made;
    made.origin = std::make_shared<Held>(std::move(batch));
    return made;
  }

 private:
  SharedParts parts_;
};

py::handle origin_of(const LogicalBatch& batch) {
  return static_cast<const Held*>(batch.origin.get())->handle();
}

class PyGradient final : public GradientStep {
 public:
  explicit PyGradient(SharedParts parts) : parts_(std::move(parts)) {}
  StepReport run(const LogicalBatch& batch, const OnMicroBatch& /*python's own*/) override {
    return parts_->call<"gradient">(origin_of(batch)).cast<StepReport>();
  }

 private:
  SharedParts parts_;
};

class PyOptimizer final : public Optimizer {
 public:
  explicit PyOptimizer(SharedParts parts) : parts_(std::move(parts)) {}
  void zero_grad() override { parts_->call<"zero_grad">(); }
  void step() override { parts_->call<"step">(); }
  std::vector<double> learning_rates() const override {
    return parts_->call<"learning_rates">().cast<std::vector<double>>();
  }

 private:
  SharedParts parts_;
};

class PySchedule final : public Schedule {
 public:
  explicit PySchedule(SharedParts parts) : parts_(std::move(parts)) {}
  void step(double loss) override { parts_->call<"schedule_step">(loss); }

 private:
  SharedParts parts_;
};

/// Failures are told by Python, which has the exception as its own object.
class PyCallback final : public Callback {
 public:
  explicit PyCallback(SharedParts parts) : parts_(std::move(parts)) {}

  void on_run_begin(const events::RunBegin& e) override {
    parts_->call<"on_run_begin">(e.epoch, e.step, e.epochs);
  }
  void on_run_end(const events::RunEnd& e) override {
    parts_->call<"on_run_end">(e.epoch, e.step, e.stopped);
  }
  void on_epoch_begin(const events::EpochBegin& e) override {
    parts_->call<"on_epoch_begin">(e.epoch, e.step);
  }
  void on_epoch_end(const events::EpochEnd& e) override {
    parts_->call<"on_epoch_end">(e.epoch, e.step, e.loss, e.samples, e.batches, e.seconds,
                                 py::tuple(py::cast(e.learning_rates)));
  }
  void on_batch_begin(const events::BatchBegin& e) override {
    parts_->call<"on_batch_begin">(e.epoch, e.step, e.batch, origin_of(e.data));
  }
  void on_batch_end(const events::BatchEnd& e) override {
    if (!parts_->call<"hears_batch_end">().is(py::bool_(true))) return;
    parts_->call<"on_batch_end">(e.epoch, e.step, e.batch, e.loss, e.samples, py::cast(*e.report),
                                 py::tuple(py::cast(e.learning_rates)));
  }

 private:
  SharedParts parts_;
};

class PyTrainer {
 public:
  PyTrainer(py::object parts, const std::string& schedule_by, std::optional<int64_t> batches)
      : parts_(std::make_shared<Parts>(Held(std::move(parts)))) {
    TrainerOptions options;
    options.callbacks = std::make_shared<PyCallback>(parts_);
    options.schedule = std::make_shared<PySchedule>(parts_);
    options.schedule_by = schedule_by == "step" ? ScheduleBy::step : ScheduleBy::epoch;
    options.batches_per_epoch = batches;
    options.interrupt = &check_signals;
    options.commit = [parts = parts_.get()](const std::function<void()>& work) {
      parts->call<"hold_signals">();
      try {
        work();
      } catch (...) {
        {
          const py::error_scope keep_error;
          parts->call<"forget_signals">();
        }
        throw;
      }
      parts->call<"release_signals">();
    };
    trainer_ = std::make_unique<Trainer>(std::make_shared<PyGradient>(parts_),
                                         std::make_shared<PyOptimizer>(parts_),
                                         std::make_shared<PyLoader>(parts_), std::move(options));
  }

  void run(int64_t epochs) { trainer_->run(epochs); }
  void step(double loss) { trainer_->step(loss); }
  void stop() { trainer_->stop(); }

  py::dict state() const {
    const TrainerState& state = trainer_->state();
    py::dict values;
    values["epoch"] = state.epoch;
    values["step"] = state.step;
    values["batch"] = state.batch;
    values["in_epoch"] = state.in_epoch;
    values["loss_sum"] = state.loss_sum;
    values["samples"] = state.samples;
    values["seconds"] = state.seconds;
    return values;
  }
  void restore(const py::dict& values) {
    TrainerState state;
    state.epoch = values["epoch"].cast<int64_t>();
    state.step = values["step"].cast<int64_t>();
    state.batch = values["batch"].cast<int64_t>();
    state.in_epoch = values["in_epoch"].cast<bool>();
    state.loss_sum = values["loss_sum"].cast<double>();
    state.samples = values["samples"].cast<int64_t>();
    state.seconds = values["seconds"].cast<double>();
    trainer_->restore(state);
  }
  bool running() const { return trainer_->running(); }
  int64_t epochs_done() const { return trainer_->state().epoch; }
  int64_t steps_done() const { return trainer_->state().step; }

  int visit(visitproc visit, void* arg) const {
    if (parts_) Py_VISIT(parts_->get());
    return 0;
  }
  void clear() {
    trainer_.reset();
    parts_.reset();
  }

 private:
  SharedParts parts_;
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace

void bind_trainer(py::module_& module) {
  py::class_<PyTrainer>(module, "Trainer", garbage_collected<PyTrainer>())
      .def(py::init<py::object, const std::string&, std::optional<int64_t>>(), py::arg("parts"),
           py::arg("schedule_by"), py::arg("batches_per_epoch"))
      .def("run", &PyTrainer::run, py::arg("epochs"))
      .def("step", &PyTrainer::step, py::arg("loss"))
      .def("stop", &PyTrainer::stop)
      .def("state", &PyTrainer::state)
      .def("restore", &PyTrainer::restore, py::arg("state"))
      .def_property_readonly("running", &PyTrainer::running)
      .def_property_readonly("epochs_done", &PyTrainer::epochs_done)
      .def_property_readonly("steps_done", &PyTrainer::steps_done);
}

}  // namespace infinitybatch::python
