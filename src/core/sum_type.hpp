#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace infinitybatch {

/// The type in which sums over micro-batches are kept: fp64 where the device has it.
inline c10::ScalarType sum_type(c10::Device device) {
  return device.type() == c10::kMPS ? c10::ScalarType::Float : c10::ScalarType::Double;
}

}  // namespace infinitybatch
