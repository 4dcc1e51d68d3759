#include "parking_argument.hpp"

#include "budget_argument.hpp"

#include <utility>

namespace infinitybatch::python {

Parking to_parking(const std::string& when, pybind11::handle host_budget, bool disk,
                   std::string directory, double host_bandwidth) {
  Parking parking;
  parking.when = when == "always"  ? Parking::When::always
                 : when == "never" ? Parking::When::never
                                   : Parking::When::needed;
  if (!host_budget.is_none()) parking.host_budget = to_budget(host_budget, "host_budget");
  parking.disk = disk;
  parking.directory = std::move(directory);
  parking.host_bandwidth = host_bandwidth;
  return parking;
}

}  // namespace infinitybatch::python
