#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>

namespace infinitybatch {

/// One micro-batch as the user's callback sees it; tensors are detached and on the model's device.
struct MicroBatch {
  int64_t begin = 0;
  int64_t end = 0;
  Batch outputs;
  Batch targets;
};

}  // namespace infinitybatch
