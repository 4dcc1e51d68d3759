#pragma once

#include <cstdint>

namespace infinitybatch {

/// Rows of the logical batch.
struct Rows {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const noexcept { return end - begin; }
};

}  // namespace infinitybatch
