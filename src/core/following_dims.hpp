#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinitybatch {

/// Dimensions of leaf `leaf`, a tensor, along which every part has its number of rows; none where
/// parts have different numbers of dimensions.
std::vector<int64_t> following_dims(const std::vector<Batch>& parts,
                                    const std::vector<int64_t>& row_counts, size_t leaf);

}  // namespace infinitybatch
