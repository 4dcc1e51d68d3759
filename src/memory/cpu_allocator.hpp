#pragma once

#include <string>

namespace infinitybatch::memory {

/// Whether torch's tensors on the CPU are counted and limited by this library.
enum class CpuAllocatorState {
  counting,       ///< this library's allocator is torch's CPU allocator
  came_too_late,  ///< another library had put its own allocator in place before, which was left
                  ///< there
  replaced,       ///< another library has put its own allocator in place since
};

/// This library's allocator takes its memory where torch's default one does (`c10::alloc_cpu`). It
/// is installed when the library is loaded.
CpuAllocatorState cpu_allocator_state() noexcept;

inline bool cpu_allocator_installed() noexcept {
  return cpu_allocator_state() == CpuAllocatorState::counting;
}

/// The state in one sentence, with a way out where there is something to mend.
std::string describe(CpuAllocatorState state);

/// \throws StateError unless `cpu_allocator_installed()`
void require_cpu_allocator();

}  // namespace infinitybatch::memory
