#include <infinitybatch/memory/statistics.hpp>

#include "memory/accelerator.hpp"
#include "memory/cpu_accounting.hpp"
#include "memory/cpu_allocator.hpp"
#include "memory/device_peaks.hpp"
#include "memory/host_memory.hpp"

namespace infinitybatch::memory {
namespace {

Statistics cpu_stats() {
  static const int64_t total = host_memory().total;
  Statistics result;
  result.live = CpuAccounting::counters().live.load(std::memory_order_relaxed);
  result.peak = CpuAccounting::counters().peak.load(std::memory_order_relaxed);
  result.reserved = result.live + kept_pages();
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

int64_t live(c10::Device device) {
  if (device.is_cpu()) return CpuAccounting::counters().live.load(std::memory_order_relaxed);
  return Accelerator(device).usage().live;
}

void reset_peak(c10::Device device) {
  if (!device.is_cpu()) return DevicePeaks::reset(device);
  CpuAccounting::Counters& counters = CpuAccounting::counters();
  counters.peak.store(counters.live.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void empty_cache() noexcept {
  give_kept_pages_back();
}

int64_t available(c10::Device device) {
  if (device.is_cpu()) return host_memory().available + kept_pages();
  const Accelerator accelerator(device);
  const auto capacity = accelerator.capacity();
  if (!capacity) return 0;
  const Accelerator::Usage usage = accelerator.usage();
  return capacity->free + usage.reserved - usage.live;
}

PeakScope::PeakScope(c10::Device device) : device_(device) {
  if (!device_.is_cpu()) {
    DevicePeaks::begin(this, device_);
    return;
  }
  require_cpu_allocator();
  CpuAccounting::open_scope(*this);
}

PeakScope::~PeakScope() {
  if (device_.is_cpu()) {
    CpuAccounting::close_scope(*this);
  } else {
    DevicePeaks::end(this);
  }
}

int64_t PeakScope::peak() const {
  return device_.is_cpu() ? CpuAccounting::scope_peak(*this) : DevicePeaks::peak(this);
}

}  // namespace infinitybatch::memory
