#include "memory/cpu_accounting.hpp"

#include "core/out_of_memory.hpp"

#include <infinitybatch/core/bytes.hpp>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch::memory {

void EventSink::record(const void* address, int64_t bytes) noexcept {
  for (EventSink* sink = this; sink != nullptr; sink = sink->outer) {
    try {
      sink->events.push_back({address, bytes});
    } catch (const std::exception&) {
      sink->lost = true;
    }
  }
}

int64_t CpuAccounting::reserve(Thread& thread, int64_t bytes) {
  if (thread.failure != nullptr && thread.failure->fails()) {
    throw_out_of_memory(bytes, "infinitybatch: allocation " + std::to_string(thread.failure->n_) +
                                   " (" + format_bytes(bytes) +
                                   ") on the CPU fails on purpose; FailAllocation asked for it");
  }
  std::atomic<int64_t>& live = counters().live;
  int64_t before = live.load(std::memory_order_relaxed);
  do {
    const int64_t excess = before + bytes - thread.limit;
    if (excess > 0) {
      thread.refused = before + bytes;
      throw_out_of_memory(bytes, "infinitybatch: allocating " + format_bytes(bytes) +
                                     " on the CPU would make " + format_bytes(before + bytes) +
                                     " live, the limit is " + format_bytes(thread.limit) + " (" +
                                     format_bytes(excess) +
                                     " too much); raise the limit or use smaller micro-batches");
    }
  } while (!live.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  return before + bytes;
}

void CpuAccounting::release(int64_t bytes) noexcept {
  counters().live.fetch_sub(bytes, std::memory_order_relaxed);
}

void CpuAccounting::raise_process_peak(int64_t live) noexcept {
  std::atomic<int64_t>& peak = counters().peak;
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (live > seen && !peak.compare_exchange_weak(seen, live, std::memory_order_relaxed)) {
  }
}

void CpuAccounting::raise_scope_peak(Thread& thread, int64_t live) noexcept {
  const bool scope = thread.scope != nullptr && live > thread.scope->peak_;
  const bool mark = live > thread.high_water;
  if (!scope && !mark) return;
  if (scope) thread.scope->peak_ = live;
  if (mark) thread.high_water = live;
  watch(thread);
}

void CpuAccounting::watch(Thread& thread) noexcept {
  const bool always = thread.trace != nullptr || thread.failure != nullptr;
  const int64_t peak = thread.scope != nullptr ? thread.scope->peak_ : kNone;
  thread.unwatched_up_to = always ? 0 : std::min({thread.limit, peak, thread.high_water});
}

int64_t CpuAccounting::set_limit(int64_t limit) noexcept {
  Thread& state = thread();
  const int64_t before = std::exchange(state.limit, limit);
  watch(state);
  return before;
}

void CpuAccounting::set_failure(FailAllocation* failure) noexcept {
  Thread& state = thread();
  state.failure = failure;
  watch(state);
}

void CpuAccounting::open_scope(PeakScope& scope) noexcept {
  Thread& state = thread();
  scope.outer_ = std::exchange(state.scope, &scope);
  scope.peak_ = counters().live.load(std::memory_order_relaxed);
  watch(state);
}

void CpuAccounting::close_scope(PeakScope& scope) noexcept {
  Thread& state = thread();
  PeakScope** place = &state.scope;
  // Recorders of nested steps end an op's scopes in any order.
  while (*place != nullptr && *place != &scope) place = &(*place)->outer_;
  if (*place == nullptr) return;
  *place = scope.outer_;
  if (scope.outer_ != nullptr) scope.outer_->peak_ = std::max(scope.outer_->peak_, scope.peak_);
  watch(state);
}

int64_t CpuAccounting::scope_peak(const PeakScope& scope) noexcept {
  int64_t peak = scope.peak_;
  for (const PeakScope* inner = thread().scope; inner != nullptr && inner != &scope;
       inner = inner->outer_) {
    peak = std::max(peak, inner->peak_);
  }
  return peak;
}

int64_t CpuAccounting::high_water() noexcept {
  const int64_t mark = thread().high_water;
  return mark == kNone ? 0 : mark;
}

void CpuAccounting::begin_high_water(bool wanted) noexcept {
  Thread& state = thread();
  state.high_water = wanted ? counters().live.load(std::memory_order_relaxed) : kNone;
  watch(state);
}

void CpuAccounting::open_trace(EventSink& sink) noexcept {
  Thread& state = thread();
  sink.outer = std::exchange(state.trace, &sink);
  watch(state);
  counters().traces.fetch_add(1, std::memory_order_relaxed);
}

void CpuAccounting::close_trace(EventSink& sink) noexcept {
  Thread& state = thread();
  state.trace = sink.outer;
  watch(state);
  counters().traces.fetch_sub(1, std::memory_order_relaxed);
}

void CpuAccounting::throw_out_of_memory(int64_t bytes, const std::string& message) {
  const auto live = static_cast<size_t>(counters().live.load(std::memory_order_relaxed));
  ++thread().failures;
  note_refusal(message);
  c10::reportOutOfMemoryToProfiler(bytes, live, 0, c10::Device(c10::DeviceType::CPU));
  throw c10::OutOfMemoryError(message);
}

}  // namespace infinitybatch::memory
