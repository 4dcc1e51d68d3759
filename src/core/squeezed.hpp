#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch {

/// What to do where outputs of a micro-batch of one sample have lost a dimension.
inline constexpr const char* kSqueezed =
    "this micro-batch has one row, and squeeze() drops its dimension too: name the one that you "
    "mean, as in squeeze(-1)";

/// Where a part of one row has fewer dimensions than one of more rows.
/// \throws BatchError
void refuse_squeezed(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                     std::string_view name);

}  // namespace infinitybatch
