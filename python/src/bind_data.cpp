#include "bind.hpp"
#include "data/dataset.hpp"
#include "errors.hpp"

#include <infinitybatch/core/errors.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

/// The samples of one split; what they are made from stays mapped while it lives.
class DataSplit {
 public:
  explicit DataSplit(app::Split split) : split_(std::move(split)) {}
  int64_t size() const { return split_.size; }
  at::Tensor inputs(const at::Tensor& indices) const { return split_.inputs(indices); }
  at::Tensor targets(const at::Tensor& indices) const { return split_.targets(indices); }

 private:
  app::Split split_;
};

py::dict described(const app::Encoding& encoding) {
  py::dict values;
  values["format"] = encoding.format;
  values["classes"] = encoding.classes;
  values["columns"] = encoding.columns;
  values["image_shape"] = encoding.image_shape;
  values["image_size"] = encoding.image_size;
  values["labels"] = encoding.labels;
  values["inputs"] = encoding.inputs;
  values["mean"] = encoding.mean;
  values["deviation"] = encoding.deviation;
  return values;
}

app::Encoding encoding_in(const py::dict& values) {
  using Names = std::vector<std::string>;
  return {
      values["format"].cast<std::string>(),     values["classes"].cast<Names>(),
      values["columns"].cast<Names>(),          values["image_shape"].cast<std::vector<int64_t>>(),
      values["image_size"].cast<std::string>(), values["labels"].cast<std::string>(),
      values["inputs"].cast<std::string>(),     values["mean"].cast<double>(),
      values["deviation"].cast<double>()};
}

py::dict load_data(const std::string& data, const std::string& labels, const std::string& inputs,
                   const std::string& csv_header, const std::string& image_size,
                   std::optional<double> held_out, int64_t context,
                   const std::optional<py::dict>& encoding) {
  app::Dataset read;
  std::optional<app::Encoding> known;
  if (encoding) known = encoding_in(*encoding);
  try {
    read = app::load_dataset({data, labels, inputs, csv_header, image_size, held_out}, context,
                             known ? &*known : nullptr);
  } catch (const app::UsageError& error) {
    throw InvalidArgument(app::one_line(error.what_without_backtrace()));
  } catch (const app::DataError& error) {
    throw BatchError(app::one_line(error.what_without_backtrace()));
  }
  constexpr const char* kKinds[] = {"vectors", "images", "text"};
  py::dict values;
  values["name"] = read.name;
  values["kind"] = kKinds[static_cast<int>(read.kind)];
  values["sample_shape"] = py::tuple(py::cast(read.sample_shape));
  values["classes"] = read.classes;
  values["encoding"] = described(read.encoding);
  values["train"] = std::make_shared<DataSplit>(std::move(read.train));
  values["held_out"] = std::make_shared<DataSplit>(std::move(read.held_out));
  return values;
}

}  // namespace

void bind_data(py::module_& module) {
  py::class_<DataSplit, std::shared_ptr<DataSplit>>(module, "DataSplit")
      .def("__len__", &DataSplit::size)
      .def("inputs", &DataSplit::inputs, py::arg("indices"))
      .def("targets", &DataSplit::targets, py::arg("indices"));
  module.def("load_data", &load_data, py::arg("data"), py::arg("labels") = "",
             py::arg("inputs") = "", py::arg("csv_header") = "auto", py::arg("image_size") = "",
             py::arg("held_out") = py::none(), py::arg("context") = 64,
             py::arg("encoding") = py::none());
}

}  // namespace infinitybatch::python
