#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace infinitybatch::memory {

/// One allocation (`bytes` > 0) or free (`bytes` < 0) of a block.
struct AllocationEvent {
  const void* address = nullptr;
  int64_t bytes = 0;
};

/// Records every allocation and free on one device made by this thread, and by the autograd threads
/// that work for it, while it lives. Any device; no vendor interface. torch's own profiler sees no
/// memory events meanwhile.
class AllocationTrace {
 public:
  explicit AllocationTrace(c10::Device device);
  ~AllocationTrace();
  AllocationTrace(const AllocationTrace&) = delete;
  AllocationTrace& operator=(const AllocationTrace&) = delete;

  /// The events so far; safe to call while the trace lives and no other thread allocates for it.
  const std::vector<AllocationEvent>& events() const;

 private:
  class Recorder;
  std::shared_ptr<Recorder> recorder_;
};

}  // namespace infinitybatch::memory
