#include <infinitybatch/execute/job.hpp>

#include <algorithm>

namespace infinitybatch {

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
