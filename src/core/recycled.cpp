#include <infinitybatch/core/recycled.hpp>

namespace infinitybatch {

std::pmr::memory_resource* recycled_memory() {
  static auto& pool = *new std::pmr::synchronized_pool_resource;  // outlives static objects
  return &pool;
}

}  // namespace infinitybatch
