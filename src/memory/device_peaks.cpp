#include "memory/device_peaks.hpp"

#include "memory/accelerator.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace infinitybatch::memory {
namespace {

struct Watch {
  c10::Device device;
  int64_t peak;
};

struct Watches {
  std::mutex mutex;
  std::unordered_map<const void*, Watch> by_watcher;

  static Watches& instance() {
    static auto& watches = *new Watches;  // outlives static holders
    return watches;
  }

  void reset(const Accelerator& accelerator) {
    const int64_t seen = accelerator.usage().peak;
    for (auto& [watcher, watch] : by_watcher) {
      if (watch.device == accelerator.device()) watch.peak = std::max(watch.peak, seen);
    }
    accelerator.reset_peak();
  }
};

}  // namespace

void DevicePeaks::begin(const void* watcher, c10::Device device) {
  const Accelerator accelerator(device);
  Watches& watches = Watches::instance();
  const std::lock_guard<std::mutex> lock(watches.mutex);
  watches.reset(accelerator);
  watches.by_watcher.insert_or_assign(watcher,
                                      Watch{accelerator.device(), accelerator.usage().live});
}

void DevicePeaks::end(const void* watcher) noexcept {
  Watches& watches = Watches::instance();
  const std::lock_guard<std::mutex> lock(watches.mutex);
  watches.by_watcher.erase(watcher);
}

int64_t DevicePeaks::peak(const void* watcher) {
  Watches& watches = Watches::instance();
  const std::lock_guard<std::mutex> lock(watches.mutex);
  const Watch& watch = watches.by_watcher.at(watcher);
  return std::max(watch.peak, Accelerator(watch.device).usage().peak);
}

void DevicePeaks::reset(c10::Device device) {
  Watches& watches = Watches::instance();
  const std::lock_guard<std::mutex> lock(watches.mutex);
  watches.reset(Accelerator(device));
}

}  // namespace infinitybatch::memory
