#include "bind.hpp"
#include "bind_offload.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

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

std::string brief(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", number);
  return text;
}

double loss_of(const StepReport& report) {
  return report.loss.to(at::kCPU, at::kDouble).item<double>();
}

std::string describe_step(const StepReport& report) {
  char number[32];
  std::string text =
      "<StepReport: loss " + brief(loss_of(report)) + ", peak " + format_bytes(report.peak_bytes);
  if (report.memory_budget) text += " of " + format_bytes(*report.memory_budget);
  std::snprintf(number, sizeof number, "%.3g s", report.seconds);
  text += ", micro-batches " + sizes(report.micro_batch_sizes) + ", " + number;
  if (report.restarts > 0) text += ", " + std::to_string(report.restarts) + " restarts";
  return text + ">";
}

/// What `as_dict` has, in the order of the class.
py::dict as_dict(const StepReport& report) {
  py::dict values;
  values["loss"] = loss_of(report);
  values["peak_bytes"] = report.peak_bytes;
  values["memory_budget"] = report.memory_budget;
  values["predicted_peak_bytes"] = report.predicted_peak_bytes;
  values["micro_batch_sizes"] = report.micro_batch_sizes;
  values["seconds"] = report.seconds;
  values["offloaded_bytes"] = report.offloaded_bytes;
  values["offload_seconds_hidden"] = report.offload_seconds.hidden;
  values["offload_seconds_waited"] = report.offload_seconds.waited;
  values["restarts"] = report.restarts;
  values["strategy"] = report.strategy;
  values["strategy_reason"] = report.strategy_reason;
  return values;
}

py::tuple state_of(const StepReport& report) {
  const py::object outputs = report.outputs ? py::object(py::make_tuple(to_python(*report.outputs)))
                                            : py::object(py::none());
  return py::make_tuple(as_dict(report), report.loss, outputs);
}

StepReport from_state(const py::tuple& state) {
  const auto values = state[0].cast<py::dict>();
  const auto read = [&](const char* name, auto& member) {
    member = values[name].cast<std::remove_reference_t<decltype(member)>>();
  };
  StepReport report;
  report.loss = state[1].cast<at::Tensor>();
  if (!state[2].is_none()) {
    report.outputs = to_batch(state[2].cast<py::tuple>()[0], Side::returned, "outputs");
  }
  read("peak_bytes", report.peak_bytes);
  read("memory_budget", report.memory_budget);
  read("predicted_peak_bytes", report.predicted_peak_bytes);
  read("micro_batch_sizes", report.micro_batch_sizes);
  read("seconds", report.seconds);
  read("offloaded_bytes", report.offloaded_bytes);
  read("offload_seconds_hidden", report.offload_seconds.hidden);
  read("offload_seconds_waited", report.offload_seconds.waited);
  read("restarts", report.restarts);
  read("strategy", report.strategy);
  read("strategy_reason", report.strategy_reason);
  return report;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else {
      result += c;
    }
  }
  return result;
}

/// \param share of the whole width, 0 to 1
std::string bar(double share, const char* colour) {
  return "<div style=\"display:inline-block;height:0.8em;margin-right:2px;background:" +
         std::string(colour) + ";width:" + brief(std::clamp(share, 0.0, 1.0) * 240) + "px\"></div>";
}

/// Micro-batches side by side, each as wide as its part of the batch; many are one bar.
std::string bars(const std::vector<int64_t>& all) {
  constexpr size_t kMostBars = 40;
  const double total = std::accumulate(all.begin(), all.end(), 0.0);
  if (all.size() > kMostBars || total == 0) return bar(1.0, "#4c78a8");
  std::string text;
  for (const int64_t size : all) text += bar(static_cast<double>(size) / total, "#4c78a8");
  return text;
}

/// For notebooks: what the report says, the peak as a part of the budget, the plan's micro-batches.
std::string html(const StepReport& report) {
  std::string rows;
  const auto row = [&](const char* name, const std::string& value) {
    rows += "<tr><th style=\"text-align:left\">" + std::string(name) +
            "</th><td style=\"text-align:left\">" + value + "</td></tr>";
  };
  row("loss", brief(loss_of(report)));
  std::string peak = format_bytes(report.peak_bytes);
  if (report.memory_budget) {
    const double share =
        static_cast<double>(report.peak_bytes) / static_cast<double>(*report.memory_budget);
    peak = bar(share, "#f58518") + " " + peak + " of " + format_bytes(*report.memory_budget);
  }
  row("peak", peak);
  row("micro-batches",
      bars(report.micro_batch_sizes) + " " + escaped(sizes(report.micro_batch_sizes)));
  row("strategy",
      escaped(report.strategy) +
          (report.strategy_reason.empty() ? "" : ": " + escaped(report.strategy_reason)));
  row("seconds", brief(report.seconds));
  if (report.offloaded_bytes > 0) row("offloaded", format_bytes(report.offloaded_bytes));
  if (report.restarts > 0) row("restarts", std::to_string(report.restarts));
  return "<table>" + rows + "</table>";
}

}  // namespace

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
                    "Why forwards ran twice, or which boundary activations of the whole batch were "
                    "kept where others were computed again, and why they were offloaded or not; "
                    "else empty.")
      .def("as_dict", &as_dict,
           "All but `outputs` as numbers, text and lists, for loggers and JSON; `loss` as a float.")
      .def("_repr_html_", &html)
      .def("__repr__", &describe_step)
      .def(py::pickle(&state_of, &from_state));
}

}  // namespace infinitybatch::python
