#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <vector>

namespace infinitybatch {

/// One micro-batch as the user's callback sees it; tensors are detached and on the model's device.
struct MicroBatch {
  int64_t begin = 0;
  int64_t end = 0;
  Batch outputs;
  Batch targets;
  /// Where rows are sorted by length (`Options::trim`): which samples of the logical batch these
  /// are. Empty otherwise: `begin` to `end`.
  std::vector<int64_t> samples = {};
};

}  // namespace infinitybatch
