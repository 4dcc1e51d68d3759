#pragma once

#include "clock.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

/// Settings that a test may change.
struct Settings {
  int64_t capacity = int64_t{1} << 30;  ///< of each device
  bool rounding = true;                 ///< blocks of 512 bytes, segments of 2 and 20 MiB, as CUDA
  int64_t fail_after = -1;              ///< this many allocations work, the next fails; -1: none
  bool blas_workspace = false;          ///< 8 MiB for each thread and stream, at the first product
  bool conv_workspaces = false;         ///< of convolutions, another number for other batch sizes
  bool atomics = false;                 ///< kernels with atomics differ from run to run
};
Settings& settings();

/// Memory of the devices is mapped twice. Tensors hold addresses of the first mapping, which nobody
/// may read or write: a host that does dies. Kernels work on the second.
/// \returns null for an address that is no device's
std::byte* host_side(const void* device_address);
/// -1 for an address that is no device's.
int device_of(const void* device_address);

/// Says that `op` uses the memory at this address of a device.
void use(Moment op, const void* device_address, bool write, const char* what);

c10::DeviceAllocator& allocator();
int64_t live_blocks();
bool is_pinned(const void* address);
c10::Allocator& pinned_allocator();

}  // namespace sim
