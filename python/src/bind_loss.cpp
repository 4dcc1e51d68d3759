#include "bind.hpp"
#include "execute/loss_state.hpp"
#include "module_walk.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/criteria.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace infinitybatch::python {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

at::Tensor to_tensor(const py::object& value, const char* what) {
  if (!THPVariable_Check(value.ptr())) {
    const bool is_number = PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr());
    throw InvalidType(std::string(what) + " must return a scalar tensor, not " +
                      Py_TYPE(value.ptr())->tp_name + (is_number ? "; remove .item()" : ""));
  }
  return value.cast<at::Tensor>();
}

/// What the loss keeps between its calls is undone where they do not count.
void tell_state(const Held& held) {
  LossState* const state = LossState::at_work();
  if (state != nullptr) state->before([&] { return held_state(held.handle()); });
}

SeparableLoss separable(const py::object& sum, const py::object& denominator) {
  SeparableLoss::Denominator part;
  if (!denominator.is_none()) {
    part = [held = Held(denominator)](const Batch& targets, int64_t samples) -> DenominatorPart {
      const py::gil_scoped_acquire gil;
      const py::object value = held.handle()(to_python(targets), samples);
      if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
      if (value.is_none()) return Undivided{};
      const double number = PyFloat_AsDouble(value.ptr());
      if (number == -1.0 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        throw InvalidType(std::string("denominator must return a number or a tensor of one, not ") +
                          Py_TYPE(value.ptr())->tp_name);
      }
      return number;
    };
  }
  return losses::separable(
      [held = Held(sum)](const Batch& outputs, const Batch& targets) {
        const py::gil_scoped_acquire gil;
        tell_state(held);
        return to_tensor(held.handle()(to_python(outputs), to_python(targets)), "sum");
      },
      std::move(part));
}

CoupledLoss coupled(const py::object& value, const std::optional<at::Device>& device,
                    std::string name) {
  return {std::move(name),
          [held = Held(value)](const Batch& outputs, const Batch& targets) {
            const py::gil_scoped_acquire gil;
            tell_state(held);
            return to_tensor(held.handle()(to_python(outputs), to_python(targets)),
                             "a coupled loss");
          },
          device};
}

SeparableLoss with_penalty(const SeparableLoss& loss, const py::object& penalty) {
  return loss.with_penalty([held = Held(penalty)] {
    const py::gil_scoped_acquire gil;
    return to_tensor(held.handle()(), "penalty");
  });
}

py::arg_v reduction_argument() {
  return py::arg("reduction") = "mean";
}

void bind_classification(py::module_& m) {
  m.def(
      "cross_entropy",
      [](const OptionalTensor& weight, int64_t ignore_index, double label_smoothing,
         const std::string& reduction) {
        return losses::cross_entropy(
            {or_undefined(weight), ignore_index, label_smoothing, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("weight") = py::none(), py::arg("ignore_index") = -100,
      py::arg("label_smoothing") = 0.0, reduction_argument(),
      R"(Cross entropy of logits, as torch.nn.CrossEntropyLoss.

Outputs (N, C, d1, ...) logits; targets class indices (N, d1, ...) or class probabilities of the
outputs' shape. The denominator of "mean" is the sum of weight[target] over targets that are not
ignored; for probabilities N * d1 * ...

Args:
    weight: (C), or None.
    ignore_index: targets of this value count for nothing.
    label_smoothing: in [0, 1].
    reduction: "mean" or "sum".)");
  m.def(
      "nll",
      [](const OptionalTensor& weight, int64_t ignore_index, const std::string& reduction) {
        return losses::nll({or_undefined(weight), ignore_index, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("weight") = py::none(), py::arg("ignore_index") = -100,
      reduction_argument(),
      R"(Negative log likelihood, as torch.nn.NLLLoss.

Outputs (N, C, d1, ...) log-probabilities; targets class indices (N, d1, ...). Options as in
`cross_entropy`.)");
  m.def(
      "multi_margin",
      [](int64_t p, double margin, const OptionalTensor& weight, const std::string& reduction) {
        return losses::multi_margin({p, margin, or_undefined(weight), parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("p") = 1, py::arg("margin") = 1.0, py::arg("weight") = py::none(),
      reduction_argument(),
      R"(Multi-class margin loss, as torch.nn.MultiMarginLoss.

Outputs (N, C); targets class indices (N). `p` is 1 or 2. The denominator of "mean" is N.)");
}

void bind_regression(py::module_& m) {
  m.def(
      "mse", [](const std::string& reduction) { return losses::mse(parse_reduction(reduction)); },
      py::kw_only(), reduction_argument(),
      R"(Squared error, as torch.nn.MSELoss.

Outputs and targets of one shape. The denominator of "mean" is the number of elements. Targets
(target, weight) are torch.nn.functional.mse_loss(weight=...): the sum of the weights.)");
  m.def(
      "l1", [](const std::string& reduction) { return losses::l1(parse_reduction(reduction)); },
      py::kw_only(), reduction_argument(),
      R"(Absolute error, as torch.nn.L1Loss. Outputs and targets as in `mse`.)");
  m.def(
      "smooth_l1",
      [](double beta, const std::string& reduction) {
        return losses::smooth_l1({beta, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("beta") = 1.0, reduction_argument(),
      R"(As torch.nn.SmoothL1Loss; `beta` is 0 or more. The denominator of "mean" is the number of elements.)");
  m.def(
      "huber",
      [](double delta, const std::string& reduction) {
        return losses::huber({delta, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("delta") = 1.0, reduction_argument(),
      R"(As torch.nn.HuberLoss; `delta` is above 0. The denominator of "mean" is the number of elements.)");
  m.def(
      "poisson_nll",
      [](bool log_input, bool full, double eps, const std::string& reduction) {
        return losses::poisson_nll({log_input, full, eps, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("log_input") = true, py::arg("full") = false, py::arg("eps") = 1e-8,
      reduction_argument(),
      R"(As torch.nn.PoissonNLLLoss. The denominator of "mean" is the number of elements.)");
  m.def(
      "gaussian_nll",
      [](bool full, double eps, const std::string& reduction) {
        return losses::gaussian_nll({full, eps, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("full") = false, py::arg("eps") = 1e-6, reduction_argument(),
      R"(As torch.nn.GaussianNLLLoss.

Outputs (mean, variance) and a target, or outputs mean and targets (target, variance). The
denominator of "mean" is the number of elements.)");
  m.def(
      "kl_div",
      [](bool log_target, const std::string& reduction) {
        return losses::kl_div({log_target, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("log_target") = false, reduction_argument(),
      R"(Kullback-Leibler divergence, as torch.nn.KLDivLoss.

Outputs log-probabilities; targets probabilities, or their logarithms with `log_target`. The
denominator of "mean" is the number of elements, that of "batchmean" N.)");
}

void bind_binary(py::module_& m) {
  m.def(
      "binary_cross_entropy",
      [](const OptionalTensor& weight, const std::string& reduction) {
        return losses::binary_cross_entropy({or_undefined(weight), parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("weight") = py::none(), reduction_argument(),
      R"(As torch.nn.BCELoss: outputs probabilities, targets in [0, 1] of the same shape.

`weight` is broadcast against one sample; weights of the samples go with the targets, as (target,
weight). The denominator of "mean" is the number of elements, weights or not.)");
  m.def(
      "binary_cross_entropy_with_logits",
      [](const OptionalTensor& weight, const OptionalTensor& pos_weight,
         const std::string& reduction) {
        return losses::binary_cross_entropy_with_logits(
            {or_undefined(weight), or_undefined(pos_weight), parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("weight") = py::none(), py::arg("pos_weight") = py::none(),
      reduction_argument(),
      R"(As torch.nn.BCEWithLogitsLoss: outputs logits, targets in [0, 1] of the same shape.

`weight` and `pos_weight` are broadcast against one sample. The denominator of "mean" is the number
of elements, weights or not.)");
  m.def(
      "soft_margin",
      [](const std::string& reduction) { return losses::soft_margin(parse_reduction(reduction)); },
      py::kw_only(), reduction_argument(),
      R"(As torch.nn.SoftMarginLoss: targets -1 or 1. The denominator of "mean" is the number of elements.)");
  m.def(
      "multilabel_margin",
      [](const std::string& reduction) {
        return losses::multilabel_margin(parse_reduction(reduction));
      },
      py::kw_only(), reduction_argument(),
      R"(As torch.nn.MultiLabelMarginLoss: outputs (N, C), targets class indices (N, C) ended by -1.

The denominator of "mean" is N.)");
  m.def(
      "multilabel_soft_margin",
      [](const OptionalTensor& weight, const std::string& reduction) {
        return losses::multilabel_soft_margin({or_undefined(weight), parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("weight") = py::none(), reduction_argument(),
      R"(As torch.nn.MultiLabelSoftMarginLoss: outputs (N, ..., C) logits, targets 0 or 1.

The denominator of "mean" is the number of elements divided by C.)");
}

void bind_distance(py::module_& m) {
  m.def(
      "hinge_embedding",
      [](double margin, const std::string& reduction) {
        return losses::hinge_embedding({margin, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("margin") = 1.0, reduction_argument(),
      R"(As torch.nn.HingeEmbeddingLoss: outputs distances, targets -1 or 1.

The denominator of "mean" is the number of elements.)");
  m.def(
      "cosine_embedding",
      [](double margin, const std::string& reduction) {
        return losses::cosine_embedding({margin, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("margin") = 0.0, reduction_argument(),
      R"(As torch.nn.CosineEmbeddingLoss: outputs (x1, x2) of shape (N, D), targets -1 or 1 of shape (N).

The denominator of "mean" is N.)");
  m.def(
      "margin_ranking",
      [](double margin, const std::string& reduction) {
        return losses::margin_ranking({margin, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("margin") = 0.0, reduction_argument(),
      R"(As torch.nn.MarginRankingLoss: outputs (x1, x2) and targets -1 or 1, all of one shape.

The denominator of "mean" is the number of elements.)");
  m.def(
      "triplet_margin",
      [](double margin, double p, double eps, bool swap, const std::string& reduction) {
        return losses::triplet_margin({margin, p, eps, swap, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("margin") = 1.0, py::arg("p") = 2.0, py::arg("eps") = 1e-6,
      py::arg("swap") = false, reduction_argument(),
      R"(As torch.nn.TripletMarginLoss: (anchor, positive, negative) of one shape (N, ..., D).

They may come from the outputs or from the targets, which may be None. The denominator of "mean" is
the number of triplets.)");
  m.def(
      "triplet_margin_with_distance",
      [](const py::object& distance_function, double margin, bool swap,
         const std::string& reduction) {
        losses::TripletMarginWithDistanceLossOptions options;
        if (!distance_function.is_none()) {
          options.distance_function = [held = Held(distance_function)](const at::Tensor& a,
                                                                       const at::Tensor& b) {
            const py::gil_scoped_acquire gil;
            return to_tensor(held.handle()(a, b), "distance_function");
          };
        }
        options.margin = margin;
        options.swap = swap;
        options.reduction = parse_reduction(reduction);
        return losses::triplet_margin_with_distance(std::move(options));
      },
      py::kw_only(), py::arg("distance_function") = py::none(), py::arg("margin") = 1.0,
      py::arg("swap") = false, reduction_argument(),
      R"(As torch.nn.TripletMarginWithDistanceLoss; None means torch.pairwise_distance.

`distance_function(a, b)` compares pair by pair and gives one number for each. The denominator of
"mean" is the number of distances.)");
}

void bind_sequence(py::module_& m) {
  m.def(
      "ctc",
      [](int64_t blank, bool zero_infinity, const std::string& reduction) {
        return losses::ctc({blank, zero_infinity, parse_reduction(reduction)});
      },
      py::kw_only(), py::arg("blank") = 0, py::arg("zero_infinity") = false, reduction_argument(),
      R"(Connectionist temporal classification, as torch.nn.CTCLoss.

Outputs log_probs (T, N, C) and targets (target, input_lengths, target_lengths), or outputs
(log_probs, input_lengths) and targets (target, target_lengths); target (N, S) is padded, lengths
are (N). "mean" divides each sample by its target's length, then by N.)");
  m.def("pad_ctc_targets", &losses::pad_ctc_targets, py::arg("concatenated"),
        py::arg("target_lengths"),
        R"(Concatenated CTC targets, which cannot be split by samples, as the (N, S) that can.

Args:
    concatenated: (sum of target_lengths).
    target_lengths: (N) integers.)");
}

}  // namespace

void bind_loss(py::module_& module) {
  py::module_ losses = module.def_submodule("losses");
  py::class_<SeparableLoss>(losses, "SeparableLoss",
                            "A sum over samples divided by a denominator known from the targets.")
      .def_property_readonly("name", &SeparableLoss::name)
      .def_property_readonly("has_penalty", &SeparableLoss::has_penalty)
      .def(
          "sum",
          [](const SeparableLoss& self, const py::object& outputs, const py::object& targets) {
            const Batch left = to_batch(outputs, Side::returned, "outputs");
            const Batch right = to_batch(targets, Side::returned, "targets");
            const py::gil_scoped_release no_gil;
            return self.sum(left, right);
          },
          py::arg("outputs"), py::arg("targets"),
          "The sum over the samples given: a tensor of one number that carries gradient.")
      .def(
          "denominator",
          [](const SeparableLoss& self, const py::object& targets, int64_t samples) -> py::object {
            const DenominatorPart part =
                self.denominator(to_batch(targets, Side::returned, "targets"), samples);
            if (const double* number = std::get_if<double>(&part)) return py::float_(*number);
            if (const auto* tensor = std::get_if<at::Tensor>(&part)) return py::cast(*tensor);
            return py::none();
          },
          py::arg("targets"), py::arg("samples"),
          "These targets' part of the denominator; None where nothing is divided.")
      .def("__repr__",
           [](const SeparableLoss& self) { return "<SeparableLoss " + self.name() + ">"; });
  py::class_<CoupledLoss>(losses, "CoupledLoss",
                          "A loss that sees the outputs of the whole logical batch at once.")
      .def_property_readonly("name", &CoupledLoss::name)
      .def("__repr__", [](const CoupledLoss& self) { return "<CoupledLoss " + self.name() + ">"; });
  losses.def("coupled", &coupled, py::arg("value"), py::arg("device"), py::arg("name"),
             R"(infinitybatch.losses.coupled without its manners.)");
  losses.def("separable", &separable, py::arg("sum"), py::arg("denominator"),
             R"(infinitybatch.losses.separable without its manners.)");
  losses.def("with_penalty", &with_penalty, py::arg("loss"), py::arg("penalty"),
             R"(infinitybatch.losses.with_penalty without its manners.)");
  bind_classification(losses);
  bind_regression(losses);
  bind_binary(losses);
  bind_distance(losses);
  bind_sequence(losses);
}

}  // namespace infinitybatch::python
