#include <infinitybatch/execute/job.hpp>

#include <infinitybatch/execute/output_law.hpp>

#include <algorithm>

namespace infinitybatch {

bool Job::learns_output_law(Rows rows) const {
  return output_law != nullptr && output_law->leaves.empty() && rows.begin == 0 &&
         rows.size() < batch_size();
}

bool Job::examines(Rows rows) const {
  return examined != nullptr && !*examined && use_tapes && rows.begin == 0 && rows.size() > 1 &&
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
  for (const NamedParameter& parameter : job.parameters) {
    const at::Device device = parameter.tensor.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

}  // namespace infinitybatch
