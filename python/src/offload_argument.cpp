#include "offload_argument.hpp"

#include "budget_argument.hpp"

#include <string>

namespace infinitybatch::python {

Offload to_offload(pybind11::handle offload) {
  Offload result;
  const auto when = offload.attr("when").cast<std::string>();
  result.when = when == "always"  ? Offload::When::always
                : when == "never" ? Offload::When::never
                                  : Offload::When::automatic;
  const pybind11::object host_budget = offload.attr("host_budget");
  if (!host_budget.is_none()) result.host_budget = to_budget(host_budget, "host_budget");
  result.disk = offload.attr("disk").cast<bool>();
  result.directory = offload.attr("directory").cast<std::string>();
  result.host_bandwidth = offload.attr("host_bandwidth").cast<double>();
  return result;
}

}  // namespace infinitybatch::python
