#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace infinitybatch::app {

/// "cpu", "cuda", "cuda:1": a device that torch has and this machine too.
/// \throws UsageError naming the devices that could be used
c10::Device parse_device(const std::string& text);

/// Every device that can be used, the CPU first.
std::vector<c10::Device> usable_devices();

}  // namespace infinitybatch::app
