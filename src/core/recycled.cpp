#include "core/recycled.hpp"

namespace infinitybatch {

std::pmr::memory_resource* recycled_memory() {
  constexpr std::pmr::pool_options kBlocks{.max_blocks_per_chunk = 0,  // as the library likes it
                                           .largest_required_pool_block = size_t{1} << 16};
  static auto& pool =
      *new std::pmr::synchronized_pool_resource(kBlocks);  // outlives static objects
  return &pool;
}

}  // namespace infinitybatch
