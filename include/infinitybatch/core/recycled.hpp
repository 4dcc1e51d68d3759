#pragma once

#include <memory>
#include <memory_resource>

namespace infinitybatch {

/// Memory that is never given back to malloc, for blocks of a few kilobytes that each step takes
/// and returns: malloc searches its bins for such sizes, which took longer than filling them. For
/// all threads.
std::pmr::memory_resource* recycled_memory();

/// A copy of `value` in such memory.
template <typename T>
std::shared_ptr<const T> recycled(const T& value) {
  return std::allocate_shared<const T>(std::pmr::polymorphic_allocator<T>(recycled_memory()),
                                       value);
}

}  // namespace infinitybatch
