#include "tape/unseen_memory.hpp"

#include "core/tensor_memory.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch::tape {

UnseenMemory::UnseenMemory(const std::vector<at::Device>& devices) : devices_{at::kCPU} {
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) devices_.push_back(device);
  }
}

void UnseenMemory::watch() {
  if (began_) return;
  began_ = true;
  for (const c10::Device& device : devices_) {
    try {
      watched_.emplace_front(device);
    } catch (const StateError&) {
      // Another allocator, or torch's profiler, is there: what is not known is refused as before.
    }
  }
}

bool UnseenMemory::contains(const at::Tensor& tensor) {
  if (storage_of(tensor) == nullptr) return false;
  for (Watched& watched : watched_) {
    if (watched.device.type() != tensor.device().type()) continue;
    const auto& events = watched.trace.events();
    for (; watched.seen < events.size(); ++watched.seen) {
      const auto& [address, bytes] = events[watched.seen];
      if (bytes > 0) {
        watched.live.insert(address);
      } else {
        watched.live.erase(address);
      }
    }
    if (watched.live.contains(tensor.storage().data())) return true;
  }
  return false;
}

}  // namespace infinitybatch::tape
