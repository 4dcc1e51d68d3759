#include "bind.hpp"

#include <infinitybatch/step/bench.hpp>

#include <pybind11/stl.h>

namespace infinitybatch::python {

namespace py = pybind11;

namespace {

py::dict to_dict(const Ratio& ratio) {
  py::dict fields;
  fields["lower"] = ratio.lower;
  fields["median"] = ratio.median;
  fields["upper"] = ratio.upper;
  return fields;
}

py::dict to_dict(const StrategyTimes& times) {
  py::dict fields;
  fields["name"] = times.name;
  fields["strategy"] = times.strategy;
  fields["why_not"] = times.why_not;
  fields["micro_batch_sizes"] = times.micro_batch_sizes;
  fields["peak_bytes"] = times.peak_bytes;
  fields["cpu_seconds"] = times.cpu_seconds;
  fields["wall_seconds"] = times.wall_seconds;
  fields["cpu"] = times.timed() ? py::object(to_dict(times.cpu)) : py::none();
  fields["wall"] = times.timed() ? py::object(to_dict(times.wall)) : py::none();
  return fields;
}

py::dict to_dict(const BenchReport& report) {
  py::dict fields;
  fields["batch_size"] = report.batch_size;
  fields["rounds"] = report.rounds;
  fields["live_bytes"] = report.live_bytes;
  fields["memory_budget"] = report.memory_budget;
  fields["reference"] = report.reference;
  py::list strategies;
  for (const StrategyTimes& times : report.strategies) strategies.append(to_dict(times));
  fields["strategies"] = strategies;
  return fields;
}

}  // namespace

void bind_bench(py::module_& module) {
  py::class_<Ratio>(module, "Ratio", "The median of the rounds' ratios, and the quartiles.")
      .def_readonly("lower", &Ratio::lower)
      .def_readonly("median", &Ratio::median)
      .def_readonly("upper", &Ratio::upper)
      .def("__repr__", [](const Ratio& self) {
        return "<Ratio " + std::to_string(self.median) + " [" + std::to_string(self.lower) + ", " +
               std::to_string(self.upper) + "]>";
      });
  py::class_<StrategyTimes>(module, "StrategyTimes",
                            "One way to get the gradient, as it was measured.")
      .def_readonly("name", &StrategyTimes::name,
                    "\"native\", \"stream\", \"planned\", \"retain-none\", \"retain-half\", "
                    "\"retain-all\" or \"rerun\".")
      .def_readonly("strategy", &StrategyTimes::strategy,
                    "As the step reported it: \"stream\", \"replay\" or \"rerun\"; \"native\".")
      .def_readonly("why_not", &StrategyTimes::why_not, "Why it was not timed; empty where it was.")
      .def_readonly("micro_batch_sizes", &StrategyTimes::micro_batch_sizes)
      .def_readonly("peak_bytes", &StrategyTimes::peak_bytes,
                    "The most that tensors occupied, what was there before included.")
      .def_readonly("cpu_seconds", &StrategyTimes::cpu_seconds,
                    "Of the process, all of its threads; one for each round.")
      .def_readonly("wall_seconds", &StrategyTimes::wall_seconds)
      .def_readonly("cpu", &StrategyTimes::cpu, "A Ratio over the reference, round by round.")
      .def_readonly("wall", &StrategyTimes::wall)
      .def_property_readonly("timed", &StrategyTimes::timed)
      .def("__repr__", [](const StrategyTimes& self) {
        return "<StrategyTimes " + self.name + ": " +
               (self.timed() ? std::to_string(self.cpu.median) + " in CPU time" : self.why_not) +
               ">";
      });
  py::class_<BenchReport>(module, "BenchReport", "What bench found.")
      .def_readonly("batch_size", &BenchReport::batch_size)
      .def_readonly("rounds", &BenchReport::rounds, "That were run.")
      .def_readonly("live_bytes", &BenchReport::live_bytes, "What tensors occupied before.")
      .def_readonly("memory_budget", &BenchReport::memory_budget, "In bytes, or None.")
      .def_readonly("reference", &BenchReport::reference,
                    "What ratios are over: \"native\", or the cheapest where native does not fit.")
      .def_readonly("strategies", &BenchReport::strategies, "A list of StrategyTimes.")
      .def(
          "as_dict", [](const BenchReport& self) { return to_dict(self); },
          "Everything as plain numbers and texts, for json.dumps.")
      .def("explain", &BenchReport::explain)
      .def("__str__", &BenchReport::explain)
      .def("__repr__", [](const BenchReport& self) {
        return "<BenchReport: " + std::to_string(self.batch_size) + " samples, " +
               std::to_string(self.strategies.size()) + " strategies over " +
               std::to_string(self.rounds) + " rounds, against " + self.reference + ">";
      });
}

}  // namespace infinitybatch::python
