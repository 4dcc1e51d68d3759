#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch::memory {

/// What this process may use of the machine's memory, in bytes.
struct HostMemory {
  int64_t total = 0;      ///< physical memory, or less where a cgroup (a container) allows less
  int64_t available = 0;  ///< what could be allocated now without swapping
};

/// Reads /proc/meminfo and the limits of this process's cgroups, version 1 or 2, and of the cgroups
/// above them as far as they are visible.
/// \param root put in front of every path that is read, for tests
/// \throws Unsupported where /proc/meminfo cannot be read
HostMemory host_memory(const std::string& root = "");

}  // namespace infinitybatch::memory
