#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <memory_resource>

namespace infinitybatch {

/// Memory that is never given back to malloc, for blocks of up to 64 KiB that each step takes and
/// returns: malloc searches its bins for such sizes, which took longer than filling them. Larger
/// blocks are malloc's. For all threads.
std::pmr::memory_resource* recycled_memory();

/// A copy of `value` in such memory.
template <typename T>
std::shared_ptr<const T> recycled(const T& value) {
  return std::allocate_shared<const T>(std::pmr::polymorphic_allocator<T>(recycled_memory()),
                                       value);
}

/// Memory for containers that end with it: its own first `kBytes`, then recycled memory. What they
/// give back is used again only when it ends.
template <size_t kBytes>
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::pmr::memory_resource* resource() { return &resource_; }

 private:
  alignas(std::max_align_t) std::array<std::byte, kBytes> first_;
  std::pmr::monotonic_buffer_resource resource_{first_.data(), kBytes, recycled_memory()};
};

}  // namespace infinitybatch
