#include "bind.hpp"

#include <infinitybatch/train/noise_scale.hpp>

namespace infinitybatch::python {

namespace py = pybind11;

void bind_noise_scale(py::module_& module) {
  py::class_<NoiseScale>(module, "NoiseScale")
      .def(py::init<double>(), py::arg("decay"))
      .def("begin", &NoiseScale::begin)
      .def("end", &NoiseScale::end, py::arg("report"), py::arg("gradient_scale"))
      .def("discard", &NoiseScale::discard)
      .def_property_readonly("noise_scale", &NoiseScale::noise_scale)
      .def("largest_useful_batch", &NoiseScale::largest_useful_batch, py::arg("efficiency"))
      .def_property_readonly("steps", &NoiseScale::steps)
      .def("state",
           [](const NoiseScale& noise) {
             const NoiseScale::Averages& averages = noise.averages();
             return py::make_tuple(averages.variance, averages.square, averages.steps);
           })
      .def(
          "restore",
          [](NoiseScale& noise, double variance, double square, int64_t steps) {
            noise.restore({variance, square, steps});
          },
          py::arg("variance"), py::arg("square"), py::arg("steps"));
}

}  // namespace infinitybatch::python
