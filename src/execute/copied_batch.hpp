#pragma once

#include <infinitybatch/core/batch.hpp>

namespace infinitybatch {

/// The same values in memory of their own: for a forward that writes its inputs and does not count,
/// and of sources that make every piece in one buffer.
Batch copied(const Batch& batch);

}  // namespace infinitybatch
