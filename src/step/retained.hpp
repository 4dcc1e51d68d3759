#pragma once

#include <cstdint>

namespace infinitybatch {

/// How many micro-batches keep their graph is said beside their size, or not at all.
/// \throws InvalidArgument
void check_retained(int64_t micro_batches, bool size_is_given);

}  // namespace infinitybatch
