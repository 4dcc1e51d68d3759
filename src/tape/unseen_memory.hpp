#pragma once

#include "memory/trace.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <list>
#include <unordered_set>
#include <vector>

namespace infinitybatch::tape {

/// Memory that code which is no operator allocates while forward runs. Inductor takes its buffers
/// from the allocator itself, and gives them to operators as `out=`: for a recording they would
/// look like tensors that were there before.
class UnseenMemory {
 public:
  /// \param devices beside the CPU
  explicit UnseenMemory(const std::vector<at::Device>& devices);

  /// Notes allocations of this thread from now on.
  void watch();
  /// Ends that. Watches end in the order that is opposite to the one they began in.
  void stop() { watched_.clear(); }
  /// Whether the memory of `tensor` was allocated since `watch`.
  bool contains(const at::Tensor& tensor);

 private:
  struct Watched {
    explicit Watched(c10::Device on) : device(on), trace(on) {}
    c10::Device device;
    memory::AllocationTrace trace;
    size_t seen = 0;  ///< events that are in `live`
    std::unordered_set<const void*> live;
  };

  std::vector<c10::Device> devices_;
  bool began_ = false;
  std::list<Watched> watched_;  ///< the last one that began is the first
};

}  // namespace infinitybatch::tape
