#include "offload_argument.hpp"

#include "budget_argument.hpp"

#include <utility>

namespace infinitybatch::python {

Offload to_offload(const std::string& when, pybind11::handle host_budget, bool disk,
                   std::string directory, double host_bandwidth) {
  Offload offload;
  offload.when = when == "always"  ? Offload::When::always
                 : when == "never" ? Offload::When::never
                                   : Offload::When::needed;
  if (!host_budget.is_none()) offload.host_budget = to_budget(host_budget, "host_budget");
  offload.disk = disk;
  offload.directory = std::move(directory);
  offload.host_bandwidth = host_bandwidth;
  return offload;
}

}  // namespace infinitybatch::python
