#pragma once

#include <cstdint>

namespace infinitybatch::memory {

/// While it lives, a CPU allocation in this thread that would make more than `bytes` live throws
/// c10::OutOfMemoryError. Nested limits: the smaller one counts. Other threads are not limited,
/// though what they hold counts as live.
class Limit {
 public:
  explicit Limit(int64_t bytes);
  ~Limit();
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  int64_t outer_;
};

}  // namespace infinitybatch::memory
