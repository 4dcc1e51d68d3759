#include "bind.hpp"
#include "bind_offload.hpp"
#include "execute/assumed_times.hpp"
#include "execute/execution_log.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <pybind11/stl.h>

#include <optional>
#include <tuple>

namespace infinitybatch::python {

namespace py = pybind11;

void bind_plan(py::module_& module) {
  module.def(
      "_assume_times",
      [](std::optional<std::tuple<double, double, double>> times) {
        if (!times) return AssumedTimes::set(std::nullopt);
        const auto& [micro_batch, sample, byte] = *times;
        AssumedTimes::set(AssumedTimes{micro_batch, sample, byte});
      },
      py::arg("times"),
      "For tests: seconds of each micro-batch, sample and copied byte, in place of what clocks "
      "say; of a byte they do where it is 0.");
  module.def("_keep_log", &ExecutionLog::keep, py::arg("on"), "For tests: see `_take_log`.");
  module.def("_take_log", &ExecutionLog::take, "For tests: what ran since the last call.");
  py::class_<Instruction>(module, "Instruction", "One instruction of a plan.")
      .def_property_readonly(
          "operation", [](const Instruction& self) { return name_of(self.operation); },
          "\"load\", \"forward\", \"loss\", \"backward\", \"free\", \"penalty\" or \"hand out\".")
      .def_readonly("micro_batch", &Instruction::micro_batch,
                    "Index into `Plan.micro_batch_sizes`; -1 for the whole logical batch.")
      .def("__repr__", [](const Instruction& self) {
        const std::string operation = name_of(self.operation);
        return self.micro_batch < 0
                   ? "<" + operation + ">"
                   : "<" + operation + " " + std::to_string(self.micro_batch) + ">";
      });
  py::class_<Candidate>(module, "Candidate", "One micro-batch size that the planner looked at.")
      .def_readonly("micro_batch_size", &Candidate::micro_batch_size, "Samples.")
      .def_readonly("peak_bytes", &Candidate::peak_bytes, "Predicted.")
      .def_readonly("seconds_per_sample", &Candidate::seconds_per_sample, "Measured, or None.")
      .def_readonly("feasible", &Candidate::feasible, "The predicted peak is inside the budget.")
      .def("__repr__", [](const Candidate& self) {
        return "Candidate(micro_batch_size=" + std::to_string(self.micro_batch_size) +
               ", peak_bytes=" + std::to_string(self.peak_bytes) +
               ", feasible=" + (self.feasible ? "True" : "False") + ")";
      });
  py::class_<Plan> plan(module, "Plan", R"(How a logical batch is computed, as data.

The executor runs the instructions, the predicted peak is read off the same ones.)");
  bind_graph_bytes(plan, "step");
  plan.def_readonly("strategy", &Plan::strategy,
                    "\"stream\", \"replay\", \"cut\" or \"checkpoint\".")
      .def_readonly("batch_size", &Plan::batch_size, "Samples of the logical batch.")
      .def_readonly("micro_batch_sizes", &Plan::micro_batch_sizes, "In the order they run.")
      .def_property_readonly("micro_batch_size", &Plan::micro_batch_size, "The largest one.")
      .def_readonly("instructions", &Plan::instructions)
      .def_readonly("budget_bytes", &Plan::budget_bytes, "The budget, or None.")
      .def_readonly("baseline_bytes", &Plan::baseline_bytes, "Live when the step starts.")
      .def_readonly("predicted_peak_bytes", &Plan::predicted_peak_bytes, "Or None.")
      .def_readonly("predicted_seconds", &Plan::predicted_seconds, "Or None.")
      .def_readonly("retained", &Plan::retained, "Micro-batches that keep their graph.")
      .def_property_readonly("offloaded_graphs", &Plan::offloaded_graphs,
                             "Of these, whose graph is kept away from the device.")
      .def_readonly("kept_boundaries", &Plan::kept_boundaries,
                    "Ops that see the whole batch, from 1, in front of which boundary activations "
                    "are kept, where those of others are computed again; None where all are.")
      .def_readonly("offloads", &Plan::offloads, "Whether what waits at cuts leaves the device.")
      .def_readonly("overlaps", &Plan::overlaps,
                    "Whether it is copied while other micro-batches, or segments, compute.")
      .def_readonly("offloaded_bytes", &Plan::offloaded_bytes,
                    "Bytes that left the device in the last step, each time counted.")
      .def_property_readonly(
          "offload_seconds_hidden", [](const Plan& self) { return self.offload_seconds.hidden; },
          "Of copies behind compute, in the last step.")
      .def_property_readonly(
          "offload_seconds_waited", [](const Plan& self) { return self.offload_seconds.waited; },
          "Waiting for copies, in the last step.")
      .def_property_readonly(
          "predicted_offload_seconds_hidden",
          [](const Plan& self) -> std::optional<double> {
            if (!self.predicted_offload_seconds) return std::nullopt;
            return self.predicted_offload_seconds->hidden;
          },
          "Of the next step, or None.")
      .def_property_readonly(
          "predicted_offload_seconds_waited",
          [](const Plan& self) -> std::optional<double> {
            if (!self.predicted_offload_seconds) return std::nullopt;
            return self.predicted_offload_seconds->waited;
          },
          "Of the next step, or None.")
      .def_readonly("candidates", &Plan::candidates, "Every size that was looked at.")
      .def_readonly("reason", &Plan::reason, "What decided the size.")
      .def("explain", &Plan::explain,
           "For people: what was chosen, what else was possible, what bounds it.")
      .def("__repr__", [](const Plan& self) {
        return "<Plan: " + self.strategy + ", " + std::to_string(self.batch_size) +
               " samples in micro-batches of up to " + std::to_string(self.micro_batch_size()) +
               ">";
      });
}

}  // namespace infinitybatch::python
