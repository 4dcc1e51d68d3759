// Losses that walk their scores in tiles. The Python module losses gives them their manners.
#include "bind.hpp"
#include "loss/backward_errors.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/contrastive.hpp>
#include <infinitybatch/loss/linear_cross_entropy.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>

namespace infinitybatch::python {
namespace {

using OptionalDevice = std::optional<at::Device>;
using OptionalTensor = std::optional<at::Tensor>;
using Tile = std::optional<int64_t>;

at::Tensor tensor_from(const py::object& value, const std::string& what) {
  if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
  throw InvalidType(what + " must be a tensor, not " + Py_TYPE(value.ptr())->tp_name);
}

losses::Learnable learnable(const py::object& value, const char* option) {
  if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
  if (PyCallable_Check(value.ptr()) != 0) {
    return [held = Held(value), option] {
      const py::gil_scoped_acquire gil;
      return tensor_from(held.handle()(), std::string("what ") + option + " returns");
    };
  }
  if (PyFloat_Check(value.ptr()) || (PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr()))) {
    return value.cast<double>();
  }
  throw InvalidType(std::string(option) +
                    " must be a number, a tensor of one, or a function that "
                    "returns one, not " +
                    Py_TYPE(value.ptr())->tp_name);
}

losses::InfoNCELossOptions info_nce_options(const py::object& temperature, bool normalize,
                                            bool symmetric, const std::string& reduction,
                                            Tile tile) {
  return {learnable(temperature, "temperature"), normalize, symmetric, parse_reduction(reduction),
          tile};
}

losses::SupConLossOptions sup_con_options(const py::object& temperature, bool normalize,
                                          const std::string& reduction, Tile tile) {
  return {learnable(temperature, "temperature"), normalize, parse_reduction(reduction), tile};
}

losses::SigLIPLossOptions siglip_options(const py::object& temperature, const py::object& bias,
                                         bool normalize, const std::string& reduction, Tile tile) {
  return {learnable(temperature, "temperature"), learnable(bias, "bias"), normalize,
          parse_reduction(reduction), tile};
}

losses::PairwiseFunction pairwise_function(const py::object& function) {
  return [held = Held(function)](const at::Tensor& rows, const at::Tensor& columns,
                                 const at::Tensor& positions, const Batch& targets) {
    const py::gil_scoped_acquire gil;
    return tensor_from(held.handle()(rows, columns, positions, to_python(targets)),
                       "what the function of losses.pairwise returns");
  };
}

void bind_pairs(py::module_& m) {
  m.def(
      "info_nce",
      [](const py::object& temperature, bool normalize, bool symmetric,
         const std::string& reduction, Tile tile, const OptionalDevice& device) {
        return losses::info_nce(
            info_nce_options(temperature, normalize, symmetric, reduction, tile), device);
      },
      py::arg("temperature"), py::arg("normalize"), py::arg("symmetric"), py::arg("reduction"),
      py::arg("tile"), py::arg("device"), "infinitybatch.losses.info_nce for VirtualBatch.");
  m.def(
      "info_nce_value",
      [](const at::Tensor& a, const at::Tensor& b, const py::object& temperature, bool normalize,
         bool symmetric, const std::string& reduction, Tile tile) {
        const auto options = info_nce_options(temperature, normalize, symmetric, reduction, tile);
        const py::gil_scoped_release no_gil;
        return losses::info_nce(a, b, options);
      },
      py::arg("a"), py::arg("b"), py::arg("temperature"), py::arg("normalize"),
      py::arg("symmetric"), py::arg("reduction"), py::arg("tile"),
      "infinitybatch.losses.info_nce of two tensors.");
  m.def(
      "sup_con",
      [](const py::object& temperature, bool normalize, const std::string& reduction, Tile tile,
         const OptionalDevice& device) {
        return losses::sup_con(sup_con_options(temperature, normalize, reduction, tile), device);
      },
      py::arg("temperature"), py::arg("normalize"), py::arg("reduction"), py::arg("tile"),
      py::arg("device"), "infinitybatch.losses.sup_con for VirtualBatch.");
  m.def(
      "sup_con_value",
      [](const at::Tensor& embeddings, const OptionalTensor& labels, const py::object& temperature,
         bool normalize, const std::string& reduction, Tile tile) {
        const auto options = sup_con_options(temperature, normalize, reduction, tile);
        const py::gil_scoped_release no_gil;
        return losses::sup_con(embeddings, labels.value_or(at::Tensor()), options);
      },
      py::arg("embeddings"), py::arg("labels"), py::arg("temperature"), py::arg("normalize"),
      py::arg("reduction"), py::arg("tile"), "infinitybatch.losses.sup_con of tensors.");
  m.def(
      "siglip",
      [](const py::object& temperature, const py::object& bias, bool normalize,
         const std::string& reduction, Tile tile, const OptionalDevice& device) {
        return losses::siglip(siglip_options(temperature, bias, normalize, reduction, tile),
                              device);
      },
      py::arg("temperature"), py::arg("bias"), py::arg("normalize"), py::arg("reduction"),
      py::arg("tile"), py::arg("device"), "infinitybatch.losses.siglip for VirtualBatch.");
  m.def(
      "siglip_value",
      [](const at::Tensor& a, const at::Tensor& b, const py::object& temperature,
         const py::object& bias, bool normalize, const std::string& reduction, Tile tile) {
        const auto options = siglip_options(temperature, bias, normalize, reduction, tile);
        const py::gil_scoped_release no_gil;
        return losses::siglip(a, b, options);
      },
      py::arg("a"), py::arg("b"), py::arg("temperature"), py::arg("bias"), py::arg("normalize"),
      py::arg("reduction"), py::arg("tile"), "infinitybatch.losses.siglip of two tensors.");
  m.def(
      "pairwise",
      [](const py::object& function, const std::string& reduction, Tile tile,
         const OptionalDevice& device) {
        return losses::pairwise(pairwise_function(function), {parse_reduction(reduction), tile},
                                device);
      },
      py::arg("function"), py::arg("reduction"), py::arg("tile"), py::arg("device"),
      "infinitybatch.losses.pairwise for VirtualBatch.");
  m.def(
      "pairwise_value",
      [](const at::Tensor& a, const at::Tensor& b, const py::object& function,
         const py::object& targets, const std::string& reduction, Tile tile) {
        const losses::PairwiseFunction call = pairwise_function(function);
        const Batch all = to_batch(targets, Side::returned, "targets");
        const losses::PairwiseLossOptions options{parse_reduction(reduction), tile};
        const py::gil_scoped_release no_gil;
        return losses::pairwise(a, b, call, all, options);
      },
      py::arg("a"), py::arg("b"), py::arg("function"), py::arg("targets"), py::arg("reduction"),
      py::arg("tile"), "infinitybatch.losses.pairwise of two tensors.");
}

void bind_head(py::module_& m) {
  m.def(
      "linear_cross_entropy",
      [](const at::Tensor& linear_weight, const OptionalTensor& linear_bias,
         const OptionalTensor& weight, int64_t ignore_index, double label_smoothing,
         const std::string& reduction, double softcap, Tile tile) {
        return losses::linear_cross_entropy(linear_weight, linear_bias.value_or(at::Tensor()),
                                            {weight.value_or(at::Tensor()), ignore_index,
                                             label_smoothing, parse_reduction(reduction)},
                                            {softcap, tile});
      },
      py::arg("linear_weight"), py::arg("linear_bias"), py::arg("weight"), py::arg("ignore_index"),
      py::arg("label_smoothing"), py::arg("reduction"), py::arg("softcap"), py::arg("tile"),
      "infinitybatch.losses.linear_cross_entropy for VirtualBatch.");
  m.def(
      "linear_cross_entropy_value",
      [](const at::Tensor& input, const at::Tensor& linear_weight, const at::Tensor& target,
         const OptionalTensor& linear_bias, const OptionalTensor& weight, int64_t ignore_index,
         double label_smoothing, const std::string& reduction, double softcap, Tile tile) {
        const losses::CrossEntropyLossOptions options{weight.value_or(at::Tensor()), ignore_index,
                                                      label_smoothing, parse_reduction(reduction)};
        const py::gil_scoped_release no_gil;
        return losses::linear_cross_entropy(input, linear_weight, target,
                                            linear_bias.value_or(at::Tensor()), options,
                                            {softcap, tile});
      },
      py::arg("input"), py::arg("linear_weight"), py::arg("target"), py::arg("linear_bias"),
      py::arg("weight"), py::arg("ignore_index"), py::arg("label_smoothing"), py::arg("reduction"),
      py::arg("softcap"), py::arg("tile"), "infinitybatch.losses.linear_cross_entropy of tensors.");
}

}  // namespace

void bind_contrastive(py::module_& module) {
  register_backward_error_handler(&throw_as_python);
  py::module_ losses = module.attr("losses").cast<py::module_>();
  bind_pairs(losses);
  bind_head(losses);
}

}  // namespace infinitybatch::python
