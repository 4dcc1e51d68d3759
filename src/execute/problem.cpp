#include "execute/problem.hpp"

#include "execute/trimming.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch {

bool Problem::is_reordered() const noexcept {
  return trimming && trimming->reorders;
}

Rows other_rows(Rows rows, int64_t batch_size) {
  const int64_t here = rows.size();
  const int64_t other = here > 2 ? here - 1 : here == 1 ? 2 : batch_size > 2 ? 3 : 1;
  const int64_t begin = std::min(rows.begin, batch_size - other);
  return {begin, begin + other};
}

std::vector<at::Device> devices_of(const Problem& problem) {
  std::vector<at::Device> devices{problem.device};
  const auto add = [&](at::Device device) {
    const bool known = std::find(devices.begin(), devices.end(), device) != devices.end();
    if (!known) devices.push_back(device);
  };
  for (const NamedParameter& parameter : problem.parameters) add(parameter.tensor.device());
  for (const at::Device& device : problem.further_devices) add(device);
  return devices;
}

int64_t gradient_bytes(const std::vector<NamedParameter>& parameters, at::Device device) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad() || tensor.device() != device) continue;
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

std::vector<at::Tensor> buffers_of(const Problem& problem) {
  std::vector<at::Tensor> buffers;
  for (const BufferSlot& slot : problem.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers.push_back(std::move(buffer));
  }
  return buffers;
}

}  // namespace infinitybatch
