#include "memory/trace.hpp"

#include "memory/accelerator.hpp"
#include "memory/cpu_accounting.hpp"
#include "memory/cpu_allocator.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <mutex>

namespace infinitybatch::memory {

// On the CPU the allocator writes to the sink. Elsewhere torch's caching allocators report to what
// stands in the profiler's slot of torch's thread-local state, which autograd carries to its
// threads. What stands there has to be a profiler: each call of a Python autograd.Function takes it
// for one, and asks for its configuration. This one is switched off.
class AllocationTrace::Recorder final : public torch::profiler::impl::ProfilerStateBase {
 public:
  explicit Recorder(c10::Device device)
      : ProfilerStateBase(
            torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)),
        device_(device) {}

  void reportMemoryUsage(void* address, int64_t bytes, size_t /*total_allocated*/,
                         size_t /*total_reserved*/, c10::Device device) override {
    if (device != device_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    sink.record(address, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  EventSink sink;

 private:
  const c10::Device device_;
  std::mutex mutex_;
};

class AllocationTrace::Guard {
 public:
  explicit Guard(std::shared_ptr<c10::DebugInfoBase> recorder)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(recorder)) {}

 private:
  c10::DebugInfoGuard guard_;
};

AllocationTrace::AllocationTrace(c10::Device device) {
  if (device.is_cpu()) {
    require_cpu_allocator();
    recorder_ = std::make_shared<Recorder>(device);
    CpuAccounting::open_trace(recorder_->sink);
    return;
  }
  // torch's profiler casts whatever stands in its slot to its own type.
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) {
    throw StateError("the memory of " + device.str() +
                     " cannot be traced while torch's profiler or another trace runs in this "
                     "thread; start the profiler after the first step, or give micro_batch_size");
  }
  recorder_ = std::make_shared<Recorder>(Accelerator(device).device());
  guard_ = std::make_unique<Guard>(recorder_);
}

AllocationTrace::~AllocationTrace() {
  if (guard_ == nullptr) CpuAccounting::close_trace(recorder_->sink);
}

const std::vector<AllocationEvent>& AllocationTrace::events() const {
  if (recorder_->sink.lost) {
    throw c10::OutOfMemoryError(
        "infinitybatch: the host had no memory left to record an allocation trace of more than " +
        std::to_string(recorder_->sink.events.size()) + " events; give micro_batch_size");
  }
  return recorder_->sink.events;
}

}  // namespace infinitybatch::memory
