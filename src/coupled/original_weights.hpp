#pragma once

#include <ATen/core/TensorBody.h>
#include "core/thread_context.hpp"

#include <cstdint>
#include <vector>

namespace infinitybatch::coupled {

/// While it lives, parameters that anybody in this thread is about to rewrite (`max_norm`) are kept
/// as they are found, for whoever runs whole steps and has to leave no trace of them. The innermost
/// keeps.
class OriginalWeights {
 public:
  /// Call it before rows of `parameter` are changed.
  static void note(const at::Tensor& parameter);

  /// Values and versions as they were found.
  void restore() const;
  /// The parameters lie in other memory from now on.
  void forget() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor parameter;
    at::Tensor before;
    uint32_t version = 0;
  };
  const Within<&ThreadContext::original_weights> within_{this};
  std::vector<Entry> entries_;
};

}  // namespace infinitybatch::coupled
