#include "device.hpp"

#include "errors.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace infinitybatch::app {

std::vector<c10::Device> usable_devices() {
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  for (int i = 0; i < static_cast<int>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES); ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    // Meta tensors hold no data, so nothing can be trained there.
    if (type == c10::DeviceType::CPU || type == c10::DeviceType::Meta ||
        !c10::impl::hasDeviceGuardImpl(type)) {
      continue;
    }
    const auto count = c10::impl::getDeviceGuardImpl(type)->deviceCount();
    for (c10::DeviceIndex index = 0; index < count; ++index) {
      devices.emplace_back(type, index);
    }
  }
  return devices;
}

c10::Device parse_device(const std::string& text) {
  const auto devices = usable_devices();
  std::string known;
  for (const c10::Device& device : devices) {
    known += (known.empty() ? "" : ", ") + device.str();
  }
  try {
    c10::Device wanted(text);
    if (!wanted.is_cpu() && !wanted.has_index()) {
      wanted.set_index(0);
    }
    if (wanted.is_cpu()) {
      return c10::Device(c10::kCPU);
    }
    if (std::find(devices.begin(), devices.end(), wanted) != devices.end()) {
      return wanted;
    }
  } catch (const c10::Error&) {
    // Told below, with what exists.
  }
  throw UsageError("--device " + text + " is not there; this machine and this torch have: " +
                   known + "; name one of these or leave --device out");
}

}  // namespace infinitybatch::app
