#include "step/meter.hpp"

#include "execute/assumed_times.hpp"
#include "memory/trace.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>

#if __has_include(<sys/resource.h>)
#include <sys/resource.h>
#endif

#include <algorithm>
#include <chrono>
#include <ctime>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

void wait_for(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

/// What clocks say at one moment.
struct Moment {
  double wall = 0;
  double own = -1;     // CPU seconds of this thread; below 0 where it does not count
  int64_t waited = 0;  // how often this thread has given the core away by itself
};

/// Where torch computes in this thread alone its CPU time is what a micro-batch costs, and does not
/// run while other programs have the core: backward of a graph on the CPU runs in the thread that
/// calls it. A thread that waited (for a disk, for threads that are not torch's) has not done
/// everything itself: there wall clock time counts.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device)
      : device_(device), alone_(device.is_cpu() && at::get_num_threads() == 1) {}

  Moment read() const {
    wait_for(device_);
    Moment moment;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    moment.wall = std::chrono::duration<double>(now).count();
#if defined(CLOCK_THREAD_CPUTIME_ID) && defined(RUSAGE_THREAD)
    timespec time{};
    rusage usage{};
    if (alone_ && clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0 &&
        getrusage(RUSAGE_THREAD, &usage) == 0) {
      moment.own = static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
      moment.waited = usage.ru_nvcsw;
    }
#endif
    return moment;
  }

  static double seconds(const Moment& from, const Moment& to) {
    const bool alone = from.own >= 0 && to.own >= 0 && from.waited == to.waited;
    return alone ? to.own - from.own : to.wall - from.wall;
  }

 private:
  at::Device device_;
  [[maybe_unused]] bool alone_;
};

/// Collects one micro-batch's trace while its operations run.
class Tracing {
 public:
  Tracing(autograd::GradientSinks* sinks, int64_t size, at::Device device)
      : sinks_(sinks), allocations_(device) {
    trace_.size = size;
    if (sinks_ == nullptr) return;
    sinks_->watch([this](const autograd::SinkEvent& event) {
      trace_.sinks.push_back({allocations_.events().size(), event, trace_.operation_starts.size()});
    });
  }
  ~Tracing() {
    if (sinks_ != nullptr) sinks_->watch(nullptr);
  }
  Tracing(const Tracing&) = delete;
  Tracing& operator=(const Tracing&) = delete;

  void begin_operation() { trace_.operation_starts.push_back(allocations_.events().size()); }

  /// What is allocated from now on belongs to no micro-batch.
  void end() { told_ = allocations_.events().size(); }

  MicroBatchTrace take() {
    trace_.events = allocations_.events();
    if (told_) trace_.events.resize(*told_);
    return std::move(trace_);
  }

 private:
  autograd::GradientSinks* sinks_;
  memory::AllocationTrace allocations_;
  MicroBatchTrace trace_;
  std::optional<size_t> told_;
};

/// A forward that a kept graph saves. Of a cut tape it is played without a graph first: what plays
/// it again takes about as long.
bool saved_where_kept(const Plan& plan, Operation operation) {
  if (plan.offloads_graphs) return false;  // what is fetched is kept already
  return operation == Operation::replay || operation == Operation::advance;
}

void note_advance(const Instruction& instruction, int64_t samples, double seconds,
                  Measurement& measured) {
  if (instruction.operation != Operation::advance) return;
  if (const auto assumed = AssumedTimes::get()) seconds = assumed->instruction(samples);
  const double of_sample = seconds / static_cast<double>(samples);
  const auto [known, is_new] = measured.advances.try_emplace(instruction.segment, of_sample);
  if (!is_new) known->second = std::min(known->second, of_sample);
}

template <typename Call>
MicroBatchProfile::Effect effect_of(at::Device device, Call&& call) {
  const int64_t before = memory::live(device);
  const memory::PeakScope peak(device);
  call();
  return {peak.peak() - before, memory::live(device) - before};
}

}  // namespace

Measurement run(Executor& executor, const Piece& piece, int64_t first_row, at::Device device) {
  const auto perform = [&](const Instruction& instruction, Rows rows) {
    executor.run(instruction, rows);
  };
  Measurement measured = run(perform, &executor.sinks(), piece, first_row, device);
  measured.dims = executor.forwards().take_lengths();
  return measured;
}

Measurement run_planned(Executor& executor, const Piece& piece, int64_t first_row,
                        at::Device device) {
  const auto perform = [&](const Instruction& instruction, Rows rows) {
    if (instruction.segment >= 0 && executor.segments() != piece.plan.segments) {
      throw SegmentsChanged(executor.segments());
    }
    executor.run(instruction, rows);
  };
  Measurement measured = run(perform, &executor.sinks(), piece, first_row, device);
  measured.dims = executor.forwards().take_lengths();
  return measured;
}

Measurement run(const Perform& perform, autograd::GradientSinks* sinks, const Piece& piece,
                int64_t first_row, at::Device device) {
  Measurement measured;
  std::optional<memory::PeakScope> peak;
  std::optional<Tracing> tracing;
  if (!piece.settled) peak.emplace(device);
  if (piece.trace) tracing.emplace(sinks, piece.plan.micro_batch_size(), device);

  const auto sums = [sinks] { return sinks != nullptr ? sinks->bytes() : 0; };
  const int64_t live = piece.settled ? 0 : memory::live(device) - sums();
  const bool timed = piece.timed_cap > 0;
  const Stopwatch watch(device);
  Moment start = timed ? watch.read() : Moment();
  double again = 0;
  std::vector<int64_t> begins{first_row};
  for (const int64_t size : piece.plan.micro_batch_sizes) begins.push_back(begins.back() + size);
  Rows rows;
  for (const Instruction& instruction : piece.plan.instructions) {
    if (instruction.micro_batch >= 0) {
      const auto index = static_cast<size_t>(instruction.micro_batch);
      rows = {begins[index], begins[index + 1]};
    }
    if (tracing && is_told(instruction)) tracing->begin_operation();
    if (instruction.operation == Operation::whole_loss && !piece.settled) {
      measured.whole_loss = effect_of(device, [&] { perform(instruction, rows); });
      continue;
    }
    if (instruction.operation == Operation::hand_out) {
      // In the first step forward runs on other rows there, within the peak of all.
      if (peak) measured.peak_bytes = peak->peak();
      if (tracing) tracing->end();
    }
    const bool saved =
        (timed || piece.trace) && saved_where_kept(piece.plan, instruction.operation);
    const Moment before = saved ? watch.read() : Moment();
    perform(instruction, rows);
    if (saved) {
      const double seconds = Stopwatch::seconds(before, watch.read());
      again += seconds;
      note_advance(instruction, rows.size(), seconds, measured);
    }
    if (timed && instruction.operation == Operation::free && instruction.segment <= 0) {
      const Moment now = watch.read();
      measured.seconds.push_back(Stopwatch::seconds(start, now));
      measured.again.push_back(std::exchange(again, 0.0));
      start = now;
      if (const auto assumed = AssumedTimes::get()) {
        measured.seconds.back() = assumed->seconds(rows.size());
        if (measured.again.back() > 0) measured.again.back() = assumed->instruction(rows.size());
      }
    }
  }

  if (tracing) measured.trace = tracing->take();
  if (peak) {
    if (measured.peak_bytes == 0) measured.peak_bytes = peak->peak();
    measured.lasting_bytes = std::max<int64_t>(0, memory::live(device) - sums() - live);
  }
  return measured;
}

}  // namespace infinitybatch
