#include <infinitybatch/memory/high_water.hpp>

#include "cpu_accounting.hpp"

#include <infinitybatch/memory/cpu_allocator.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace infinitybatch::memory {

struct HighWater::Mark {
  explicit Mark(c10::Device on) : device(on) {}

  c10::Device device;
  std::thread::id thread = std::this_thread::get_id();
  std::atomic<int64_t> peak{0};

  /// The marks of this thread. Those whose owner is gone are dropped at the next look.
  static std::vector<std::weak_ptr<Mark>>& of_thread() {
    static thread_local std::vector<std::weak_ptr<Mark>> marks;
    return marks;
  }

  /// Tells every mark of this thread what the allocator has seen since the last look.
  static void look(c10::Device device) {
    int64_t seen = 0;
    if (device.is_cpu()) {
      seen = CpuAccounting::high_water();
    } else {
      seen = stats(device).peak;
      reset_peak(device);
    }
    auto& marks = of_thread();
    bool any_on_cpu = false;
    std::erase_if(marks, [&](const std::weak_ptr<Mark>& weak) {
      const auto mark = weak.lock();
      if (mark == nullptr) return true;
      any_on_cpu = any_on_cpu || mark->device.is_cpu();
      if (mark->device == device) mark->peak = std::max(mark->peak.load(), seen);
      return false;
    });
    if (device.is_cpu()) CpuAccounting::begin_high_water(any_on_cpu);
  }
};

HighWater::HighWater(c10::Device device) : mark_(std::make_shared<Mark>(device)) {
  if (device.is_cpu()) require_cpu_allocator();
  Mark::look(device);
  mark_->peak = stats(device).live;
  Mark::of_thread().push_back(mark_);
  if (device.is_cpu()) CpuAccounting::begin_high_water(true);
}

HighWater::~HighWater() {
  if (mark_->thread != std::this_thread::get_id()) return;
  const c10::Device device = mark_->device;
  mark_.reset();
  // So that the allocator need not watch for nobody.
  if (device.is_cpu()) Mark::look(device);
}

int64_t HighWater::peak() const {
  if (mark_->thread == std::this_thread::get_id()) Mark::look(mark_->device);
  return mark_->peak;
}

}  // namespace infinitybatch::memory
