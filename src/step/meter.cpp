#include "meter.hpp"

#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/memory/trace.hpp>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <ctime>
#include <optional>

namespace infinitybatch {
namespace {

void wait_for(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

/// Seconds since some moment. Where all of the work is this thread's it is this thread's CPU time,
/// which does not run while other programs have the core: backward of a graph on the CPU runs in
/// the thread that calls it. What a source waits for (a disk) is not in it.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device)
      : device_(device), own_time_(device.is_cpu() && at::get_num_threads() == 1) {}

  double read() const {
    wait_for(device_);
#ifdef CLOCK_THREAD_CPUTIME_ID
    if (own_time_) {
      timespec time{};
      if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0) {
        return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
      }
    }
#endif
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
  }

 private:
  at::Device device_;
  [[maybe_unused]] bool own_time_;
};

/// Collects one micro-batch's trace while its operations run.
class Tracing {
 public:
  Tracing(Executor& executor, int64_t size, at::Device device)
      : executor_(executor), allocations_(device) {
    trace_.size = size;
    executor.sinks().watch([this](const autograd::SinkEvent& event) {
      trace_.sinks.push_back({allocations_.events().size(), event});
    });
  }
  ~Tracing() { executor_.sinks().watch(nullptr); }
  Tracing(const Tracing&) = delete;
  Tracing& operator=(const Tracing&) = delete;

  void begin_operation() { trace_.operation_starts.push_back(allocations_.events().size()); }

  MicroBatchTrace take() {
    trace_.events = allocations_.events();
    return std::move(trace_);
  }

 private:
  Executor& executor_;
  memory::AllocationTrace allocations_;
  MicroBatchTrace trace_;
};

}  // namespace

Measurement run(Executor& executor, const Piece& piece, int64_t first_row, at::Device device) {
  Measurement measured;
  std::optional<memory::PeakScope> peak;
  std::optional<Tracing> tracing;
  if (!piece.settled) peak.emplace(device);
  if (piece.trace) tracing.emplace(executor, piece.plan.batch_size, device);

  const bool timed = piece.timed_cap > 0;
  const Stopwatch watch(device);
  double start = timed ? watch.read() : 0;
  std::vector<int64_t> begins{first_row};
  for (const int64_t size : piece.plan.micro_batch_sizes) begins.push_back(begins.back() + size);
  Rows rows;
  for (const Instruction& instruction : piece.plan.instructions) {
    if (instruction.micro_batch >= 0) {
      const auto index = static_cast<size_t>(instruction.micro_batch);
      rows = {begins[index], begins[index + 1]};
    }
    if (tracing && instruction.micro_batch >= 0) tracing->begin_operation();
    executor.run(instruction.operation, rows);
    if (timed && instruction.operation == Operation::free) {
      const double now = watch.read();
      measured.seconds.push_back(now - start);
      start = now;
    }
  }

  if (tracing) measured.trace = tracing->take();
  if (peak) measured.peak_bytes = peak->peak();
  return measured;
}

}  // namespace infinitybatch
