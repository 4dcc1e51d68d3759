#include "execute/job.hpp"

#include "execute/findings.hpp"

#include <algorithm>

namespace infinitybatch {

bool Job::learns_output_law(Rows rows) const {
  return coupled != nullptr && outside == nullptr && !rehearses &&
         findings->output_law.leaves.empty() && rows.begin == 0 && rows.size() < batch_size();
}

bool Job::examines(Rows rows) const {
  return asks_for_mixing() && !findings->examined && rows.begin == 0 && rows.size() > 1 &&
         rows.size() < batch_size();
}

Rows other_rows(Rows rows, int64_t batch_size) {
  const int64_t here = rows.size();
  const int64_t other = here > 2 ? here - 1 : here == 1 ? 2 : batch_size > 2 ? 3 : 1;
  const int64_t begin = std::min(rows.begin, batch_size - other);
  return {begin, begin + other};
}

std::vector<at::Device> devices_of(const Job& job) {
  std::vector<at::Device> devices{job.device};
  const auto add = [&](at::Device device) {
    const bool known = std::find(devices.begin(), devices.end(), device) != devices.end();
    if (!known) devices.push_back(device);
  };
  for (const NamedParameter& parameter : job.parameters) add(parameter.tensor.device());
  for (const at::Device& device : job.further_devices) add(device);
  return devices;
}

}  // namespace infinitybatch
