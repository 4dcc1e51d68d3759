#include "memory/high_water.hpp"

#include "memory/cpu_accounting.hpp"
#include "memory/cpu_allocator.hpp"
#include "memory/device_peaks.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace infinitybatch::memory {

// On the CPU. On an accelerator the object's own address watches, see DevicePeaks.
struct HighWater::Mark {
  explicit Mark(c10::Device on) : device(on) {}

  c10::Device device;
  std::thread::id thread = std::this_thread::get_id();
  std::atomic<int64_t> peak{0};
  bool paused = false;

  /// The marks of this thread. Those whose owner is gone are dropped at the next look.
  static std::vector<std::weak_ptr<Mark>>& of_thread() {
    static thread_local std::vector<std::weak_ptr<Mark>> marks;
    return marks;
  }

  /// Tells every mark of this thread what the allocator has seen since the last look.
  static void look() {
    const int64_t seen = CpuAccounting::high_water();
    auto& marks = of_thread();
    std::erase_if(marks, [&](const std::weak_ptr<Mark>& weak) {
      const auto mark = weak.lock();
      if (mark != nullptr && !mark->paused) mark->peak = std::max(mark->peak.load(), seen);
      return mark == nullptr;
    });
    CpuAccounting::begin_high_water(!marks.empty());
  }
};

HighWater::HighWater(c10::Device device) : mark_(std::make_shared<Mark>(device)) {
  if (!device.is_cpu()) {
    DevicePeaks::begin(this, device);
    return;
  }
  require_cpu_allocator();
  Mark::look();
  mark_->peak = live(device);
  Mark::of_thread().push_back(mark_);
  CpuAccounting::begin_high_water(true);
}

HighWater::~HighWater() {
  if (!mark_->device.is_cpu()) {
    DevicePeaks::end(this);
    return;
  }
  if (mark_->thread != std::this_thread::get_id()) return;
  mark_.reset();
  Mark::look();  // so that the allocator need not watch for nobody
}

int64_t HighWater::peak() const {
  if (!mark_->device.is_cpu()) return DevicePeaks::peak(this);
  if (mark_->thread == std::this_thread::get_id()) Mark::look();
  return mark_->peak;
}

HighWater::Pause::Pause(const HighWater* paused) {
  if (paused == nullptr || !paused->mark_->device.is_cpu()) return;
  mark_ = paused->mark_;
  Mark::look();
  mark_->paused = true;
}

HighWater::Pause::~Pause() {
  if (mark_ == nullptr) return;
  Mark::look();  // for the others
  mark_->paused = false;
}

}  // namespace infinitybatch::memory
