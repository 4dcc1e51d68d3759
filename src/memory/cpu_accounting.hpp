#pragma once

#include "memory/failure_injection.hpp"
#include "memory/trace.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace infinitybatch::memory {

/// Where a trace of this thread's CPU allocations writes.
struct EventSink {
  std::vector<AllocationEvent> events;
  bool lost = false;  ///< there was no memory for an event
  EventSink* outer = nullptr;

  /// Never throws: frees run in destructors.
  void record(const void* address, int64_t bytes) noexcept;
};

/// The books of the CPU allocator: one set of counters for the process and one small state a
/// thread.
///
/// The allocator's way is in cpu_allocator.cpp; whatever is not on it is here. An allocation
/// compares once with its thread's `unwatched_up_to`, below which nobody in the thread wants to
/// know of it.
class CpuAccounting {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  struct alignas(64) Counters {
    std::atomic<int64_t> live{0};
    std::atomic<int64_t> peak{0};
    std::atomic<int32_t> traces{0};  ///< in all threads: lets a free skip its thread's state
  };

  struct Thread {
    /// The smallest of the limit, the innermost scope's peak and the high water mark; 0 while there
    /// is a trace or a failure to inject. Kept by `watch`.
    int64_t unwatched_up_to = kNone;
    int64_t limit = kNone;
    int64_t refused = 0;         ///< what the allocation last refused would have made live
    int64_t high_water = kNone;  ///< highest live bytes since it was begun; kNone: nobody asks
    int64_t failures = 0;        ///< allocations of this thread that failed, for whatever reason
    EventSink* trace = nullptr;
    FailAllocation* failure = nullptr;
    PeakScope* scope = nullptr;
  };

  static Counters& counters() noexcept;
  static Thread& thread() noexcept;

  /// Adds `bytes` to what is live, heeding injected failures and the limit. Returns the sum.
  /// \throws c10::OutOfMemoryError
  static int64_t reserve(Thread& thread, int64_t bytes);
  static void release(int64_t bytes) noexcept;
  static void raise_process_peak(int64_t live) noexcept;
  static void raise_scope_peak(Thread& thread, int64_t live) noexcept;

  /// \returns the limit that was in force
  static int64_t set_limit(int64_t limit) noexcept;
  static void set_failure(FailAllocation* failure) noexcept;

  static void open_scope(PeakScope& scope) noexcept;
  static void close_scope(PeakScope& scope) noexcept;
  static int64_t scope_peak(const PeakScope& scope) noexcept;

  /// What this thread has seen since `begin_high_water`; 0 where nobody has asked for it.
  static int64_t high_water() noexcept;
  /// Starts anew from what is live, or stops.
  static void begin_high_water(bool wanted) noexcept;

  static void open_trace(EventSink& sink) noexcept;
  static void close_trace(EventSink& sink) noexcept;

  [[noreturn]] static void throw_out_of_memory(int64_t bytes, const std::string& message);

 private:
  static void watch(Thread& thread) noexcept;
};

}  // namespace infinitybatch::memory
