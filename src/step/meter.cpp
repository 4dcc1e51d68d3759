#include "meter.hpp"

#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/memory/trace.hpp>

#include <ATen/DeviceAccelerator.h>

#include <chrono>
#include <optional>

namespace infinitybatch {
namespace {

using Clock = std::chrono::steady_clock;

void wait_for(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

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
  if (piece.timed_cap > 0) wait_for(device);
  const Clock::time_point start = Clock::now();

  int64_t at_work = -1;
  Rows rows{first_row, first_row};
  for (const Instruction& instruction : piece.plan.instructions) {
    if (instruction.micro_batch > at_work) {
      at_work = instruction.micro_batch;
      rows.begin = rows.end;
      rows.end += piece.plan.micro_batch_sizes[static_cast<size_t>(at_work)];
    }
    if (tracing && instruction.micro_batch >= 0) tracing->begin_operation();
    executor.run(instruction.operation, rows);
  }

  if (piece.timed_cap > 0) {
    wait_for(device);
    measured.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }
  if (tracing) measured.trace = tracing->take();
  if (peak) measured.peak_bytes = peak->peak();
  return measured;
}

}  // namespace infinitybatch
