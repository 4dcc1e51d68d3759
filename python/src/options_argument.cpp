#include "options_argument.hpp"

#include "budget_argument.hpp"
#include "python_batch.hpp"
#include "signals.hpp"
#include "step/options.hpp"

#include <infinitybatch/core/errors.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace infinitybatch::python {
namespace {

using OnMicroBatch = std::function<void(const MicroBatch&)>;
using LossScale = std::function<at::Tensor()>;
using Interrupt = std::function<void()>;

/// Values of options: from Python, and as Python writes them. Numbers and truth values are
/// pybind11's.
struct Values {
  std::vector<Held>& held;

  Held hold(const py::object& object) const { return held.emplace_back(object); }

  template <typename Value>
  void read(const py::object& given, const char* /*name*/, Value& value) const {
    value = given.cast<Value>();
  }
  void read(const py::object& given, const char* name, std::optional<memory::Budget>& value) const {
    if (!given.is_none()) value = to_budget(given, name);
  }
  /// \param given a dimension, or dimensions by name or position as text, which are checked
  void read(const py::object& given, const char* /*name*/, std::optional<BatchDim>& value) const {
    if (given.is_none()) return;
    if (PyDict_Check(given.ptr()) != 0) {
      value = BatchDim(given.cast<BatchDim::ByArgument>());
    } else {
      value = BatchDim(given.cast<int64_t>());
    }
  }
  /// \param given infinitybatch.trim_padding's, which have been checked, with each argument's name
  /// and position
  void read(const py::object& given, const char* /*name*/, std::vector<TrimPadding>& value) const {
    if (given.is_none()) return;
    for (const py::handle each : given) {
      TrimPadding trim;
      trim.mask = each.attr("mask").cast<std::vector<std::string>>();
      trim.padding = each.attr("padding").cast<double>();
      trim.left = each.attr("left").cast<bool>();
      trim.inputs = each.attr("inputs").cast<std::vector<std::string>>();
      trim.targets = each.attr("targets").cast<bool>();
      const py::object lengths = each.attr("lengths");
      if (!lengths.is_none()) {
        trim.lengths = [call = hold(lengths)](const Batch& inputs) {
          const py::gil_scoped_acquire gil;
          return call.handle()(to_python(inputs)).cast<at::Tensor>();
        };
      }
      value.push_back(std::move(trim));
    }
  }
  void read(const py::object& given, const char* /*name*/, BatchCoupling& value) const {
    const bool exact = given.cast<std::string>() == "exact";
    value = exact ? BatchCoupling::exact : BatchCoupling::per_micro_batch;
  }
  /// \param given an infinitybatch.Offload, which has checked its values but the host budget
  void read(const py::object& given, const char* /*name*/, Offload& value) const {
    const auto when = given.attr("when").cast<std::string>();
    value.when = when == "always"  ? Offload::When::always
                 : when == "never" ? Offload::When::never
                                   : Offload::When::automatic;
    read(given.attr("host_budget"), "host_budget", value.host_budget);
    value.disk = given.attr("disk").cast<bool>();
    value.directory = given.attr("directory").cast<std::string>();
    value.host_bandwidth = given.attr("host_bandwidth").cast<double>();
  }
  void read(const py::object& given, const char* /*name*/, OnMicroBatch& value) const {
    if (given.is_none()) return;
    const py::object type = py::module_::import("infinitybatch._options").attr("MicroBatch");
    value = [callback = hold(given), type = hold(type)](const MicroBatch& seen) {
      const py::gil_scoped_acquire gil;
      // A wrapped module sees no targets.
      const bool has_targets = !seen.targets.leaves().empty();
      const py::object samples =
          seen.samples.empty() ? py::module_::import("builtins").attr("range")(seen.begin, seen.end)
                               : py::object(py::tuple(py::cast(seen.samples)));
      callback.handle()(type.handle()(seen.begin, seen.end, to_python(seen.outputs),
                                      has_targets ? to_python(seen.targets) : py::none(), samples));
    };
  }
  void read(const py::object& given, const char* /*name*/, LossScale& value) const {
    if (given.is_none()) return;
    value = [scale = hold(given)] {
      const py::gil_scoped_acquire gil;
      return scale.handle()().cast<at::Tensor>();
    };
  }
};

py::object written(bool value) {
  return py::bool_(value);
}
py::object written(int64_t value) {
  return py::int_(value);
}
py::object written(const std::optional<int64_t>& value) {
  return py::cast(value);
}
py::object written(const std::optional<memory::Budget>& /*none*/) {
  return py::none();
}
py::object written(const std::optional<BatchDim>& /*none*/) {
  return py::none();
}
py::object written(const std::vector<TrimPadding>& /*none*/) {
  return py::none();
}
py::object written(const OnMicroBatch& /*none*/) {
  return py::none();
}
py::object written(const LossScale& /*none*/) {
  return py::none();
}
py::object written(BatchCoupling value) {
  return py::str(value == BatchCoupling::exact ? "exact" : "per_micro_batch");
}
py::object written(const Offload& value) {
  return py::str(value.when == Offload::When::automatic ? "auto" : "another");
}

/// `each(name, value)` for every option but the one that is the bindings' own.
template <typename Each>
void for_each_of_python(Options& options, const Each& each) {
  for_each_option(options, [&](const char* name, auto& value) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, Interrupt>) each(name, value);
  });
}

}  // namespace

Options to_options(const py::dict& given, std::vector<Held>& held) {
  Options options;
  const Values values{held};
  size_t known = 0;
  for_each_of_python(options, [&](const char* name, auto& value) {
    if (!given.contains(name)) return;
    ++known;
    values.read(given[name], name, value);
  });
  if (known < given.size()) {
    const py::dict defaults = option_defaults();
    for (const auto& [name, value] : given) {
      if (!defaults.contains(name)) throw InvalidType(name.cast<std::string>() + " is no option");
    }
  }
  options.interrupt = &check_signals;
  return options;
}

py::dict option_defaults() {
  py::dict defaults;
  Options options;
  for_each_of_python(options,
                     [&](const char* name, auto& value) { defaults[name] = written(value); });
  return defaults;
}

}  // namespace infinitybatch::python
