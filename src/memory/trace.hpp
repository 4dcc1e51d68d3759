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

/// Records every allocation and free on one device made by this thread while it lives; on
/// accelerators also those made by the autograd threads that work for it (CPU nodes run in this
/// thread). No vendor interface. Traces nest. Use it in one thread, and end inner traces first.
///
/// On the CPU torch's own profiler may run at the same time. On accelerators a trace takes the
/// profiler's place, which would break one that is running.
class AllocationTrace {
 public:
  /// \throws StateError on the CPU where torch does not use this library's allocator, on
  ///         accelerators where torch's profiler (or a trace) runs in this thread
  explicit AllocationTrace(c10::Device device);
  ~AllocationTrace();
  AllocationTrace(const AllocationTrace&) = delete;
  AllocationTrace& operator=(const AllocationTrace&) = delete;

  /// The events so far; safe to call while the trace lives and no other thread allocates for it.
  /// \throws c10::OutOfMemoryError where there was no memory to record an event
  const std::vector<AllocationEvent>& events() const;

 private:
  class Recorder;
  class Guard;

  std::shared_ptr<Recorder> recorder_;
  std::unique_ptr<Guard> guard_;  // accelerators: keeps the recorder in torch's thread-local state
};

}  // namespace infinitybatch::memory
