#include <infinitybatch/memory/statistics.hpp>

#include "accelerator.hpp"
#include "cpu_accounting.hpp"

#include <infinitybatch/memory/cpu_allocator.hpp>
#include <infinitybatch/memory/host_memory.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch::memory {
namespace {

Statistics cpu_stats() {
  static const int64_t total = host_memory().total;
  Statistics result;
  result.live = CpuAccounting::counters().live.load(std::memory_order_relaxed);
  result.peak = CpuAccounting::counters().peak.load(std::memory_order_relaxed);
  const int64_t limit = CpuAccounting::thread().limit;
  if (limit != CpuAccounting::kNone) result.limit = limit;
  result.total = total;
  return result;
}

}  // namespace

Statistics stats(c10::Device device) {
  if (device.is_cpu()) return cpu_stats();
  const Accelerator accelerator(device);
  const Accelerator::Usage usage = accelerator.usage();
  Statistics result;
  result.live = usage.live;
  result.peak = usage.peak;
  result.reserved = usage.reserved;
  if (const auto capacity = accelerator.capacity()) result.total = capacity->total;
  return result;
}

void reset_peak(c10::Device device) {
  if (!device.is_cpu()) return Accelerator(device).reset_peak();
  CpuAccounting::Counters& counters = CpuAccounting::counters();
  counters.peak.store(counters.live.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

int64_t available(c10::Device device) {
  if (device.is_cpu()) return host_memory().available;
  const Accelerator accelerator(device);
  const auto capacity = accelerator.capacity();
  if (!capacity) return 0;
  const Accelerator::Usage usage = accelerator.usage();
  return capacity->free + usage.reserved - usage.live;
}

// Scopes on accelerators: the device keeps one peak, and every scope resets it when it starts. What
// it showed before is saved in the scope around.
PeakScope::PeakScope(c10::Device device) : device_(device) {
  if (device_.is_cpu()) {
    require_cpu_allocator();
    CpuAccounting::open_scope(*this);
    return;
  }
  const Accelerator accelerator(device);
  device_ = accelerator.device();
  PeakScope*& innermost = CpuAccounting::thread().device_scope;
  for (PeakScope* scope = innermost; scope != nullptr; scope = scope->outer_) {
    if (scope->device_ != device_) continue;
    scope->peak_ = std::max(scope->peak_, accelerator.usage().peak);
    break;
  }
  accelerator.reset_peak();
  outer_ = std::exchange(innermost, this);
}

PeakScope::~PeakScope() {
  if (device_.is_cpu()) {
    CpuAccounting::close_scope(*this);
    return;
  }
  CpuAccounting::thread().device_scope = outer_;
  for (PeakScope* scope = outer_; scope != nullptr; scope = scope->outer_) {
    if (scope->device_ != device_) continue;
    scope->peak_ = std::max(scope->peak_, peak_);
    break;
  }
}

int64_t PeakScope::peak() const {
  if (device_.is_cpu()) return CpuAccounting::scope_peak(*this);
  int64_t peak = std::max(peak_, Accelerator(device_).usage().peak);
  for (const PeakScope* inner = CpuAccounting::thread().device_scope;
       inner != nullptr && inner != this; inner = inner->outer_) {
    if (inner->device_ == device_) peak = std::max(peak, inner->peak_);
  }
  return peak;
}

}  // namespace infinitybatch::memory
