#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch::memory {

/// Whether torch's tensors on the CPU are counted and limited by this library.
enum class CpuAllocatorState {
  counting,       ///< this library's allocator is torch's CPU allocator
  came_too_late,  ///< another library had put its own allocator in place before, which was left
                  ///< there
  replaced,       ///< another library has put its own allocator in place since
};

/// This library's allocator is installed when the library is loaded. Small blocks are malloc's,
/// large ones come in pages of its own (`Pages`).
CpuAllocatorState cpu_allocator_state() noexcept;

inline bool cpu_allocator_installed() noexcept {
  return cpu_allocator_state() == CpuAllocatorState::counting;
}

/// Bytes of pages that the allocator holds for the next large tensors.
int64_t kept_pages() noexcept;
void give_kept_pages_back() noexcept;

/// The state in one sentence, with a way out where there is something to mend.
std::string describe(CpuAllocatorState state);

/// \throws StateError unless `cpu_allocator_installed()`
void require_cpu_allocator();

}  // namespace infinitybatch::memory
