#include "bind.hpp"
#include "garbage_collected.hpp"
#include "loss_argument.hpp"
#include "options_argument.hpp"
#include "python_model.hpp"
#include "python_source.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/train/evaluation.hpp>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch::python {
namespace {

/// An Evaluation that ends with `close`, whenever Python lets go of it.
class PyEvaluation {
 public:
  PyEvaluation(const py::object& model, const py::object& loss, const py::kwargs& given) {
    Options options = to_options(given, held_);
    batch_dim_ = std::exchange(options.batch_dim, std::nullopt);  // of arguments, as they come here
    const Held view = held_.emplace_back(model);
    const Held forward = held_.emplace_back(model.attr("forward"));
    Loss value = to_loss(loss);
    loss_ = value;
    const bool whole = std::holds_alternative<CoupledLoss>(value);
    evaluation_ = std::make_unique<Evaluation>(
        model_of(view, forward, whole ? Outputs::for_one_loss : Outputs::read_by_parts,
                 /*is_static=*/false),
        std::move(value), std::move(options));
  }

  void add(const py::object& inputs, const py::object& targets) {
    if (!evaluation_) throw StateError("this evaluation has ended");
    torch::PyWarningHandler warnings;  // torch's warnings become Python's
    try {
      const Sides sides = to_sides(inputs, targets, batch_dim_, *loss_);
      const py::gil_scoped_release no_gil;
      evaluation_->add(sides.inputs, sides.targets);
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  }

  double loss() const { return evaluation_->loss(); }
  int64_t samples() const { return evaluation_->samples(); }
  void close() { evaluation_.reset(); }

  int visit(visitproc visit, void* arg) const {
    for (const Held& object : held_) Py_VISIT(object.get());
    return 0;
  }
  void clear() {
    close();
    held_.clear();
  }

 private:
  std::vector<Held> held_;
  std::optional<BatchDim> batch_dim_;
  std::optional<Loss> loss_;
  std::unique_ptr<Evaluation> evaluation_;
};

}  // namespace

void bind_evaluation(py::module_& module) {
  py::class_<PyEvaluation>(module, "Evaluation", garbage_collected<PyEvaluation>())
      .def(py::init<const py::object&, const py::object&, const py::kwargs&>(), py::arg("model"),
           py::arg("loss"))
      .def("add", &PyEvaluation::add, py::arg("inputs"), py::arg("targets"))
      .def("loss", &PyEvaluation::loss)
      .def("samples", &PyEvaluation::samples)
      .def("close", &PyEvaluation::close);
}

}  // namespace infinitybatch::python
