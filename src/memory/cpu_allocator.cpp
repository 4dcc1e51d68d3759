#include "memory/cpu_allocator.hpp"

#include "memory/cpu_accounting.hpp"
#include "memory/pages.hpp"
#include "memory/seams.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/env.h>

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>

namespace infinitybatch::memory {
namespace {

using Counters = CpuAccounting::Counters;
using Thread = CpuAccounting::Thread;

// They outlive every static tensor: they are constants at load time and have no destructor.
constinit Counters process_counters;
constinit Seams process_seams;
constinit Pages process_pages(process_seams);
constinit thread_local Thread this_thread;

c10::Device cpu() {
  return c10::Device(c10::DeviceType::CPU);
}

// In front of the data of each block, so that a free needs no table.
struct Header {
  void* start;
  int64_t bytes;
};
// The data behind it is aligned as torch's own.
constexpr size_t kAlignment = c10::gAlignment;
static_assert(kAlignment >= sizeof(Header) + alignof(std::max_align_t));

// Small blocks come from malloc and are aligned here: glibc splits what it aligns, and the parts in
// front and behind keep freed neighbours from joining.
enum class Source { malloc, pages, torch };

// From malloc a large block leaves a hole between small ones.
constexpr int64_t kLarge = 128 << 10;
// Where THP_MEM_ALLOC_ENABLE asks torch for huge pages, blocks of that size and more are torch's.
constexpr int64_t kHugePage = 2 << 20;

Source source_of(int64_t bytes) noexcept {
  if (bytes < kLarge || bytes < Pages::worthwhile()) return Source::malloc;
  static const bool huge_pages = c10::utils::check_env("THP_MEM_ALLOC_ENABLE").value_or(false);
  if (bytes >= kHugePage && huge_pages) return Source::torch;
  return Pages::supported() ? Source::pages : Source::malloc;
}

int64_t seconds_now() noexcept {
#ifdef CLOCK_MONOTONIC_COARSE
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec;
#else
  return 0;
#endif
}

// No machine has more, and sums of it with what is live stay within int64_t.
constexpr size_t kMost = size_t{1} << 62;

Header& header_of(void* data) noexcept {
  return static_cast<Header*>(data)[-1];
}

void* take(size_t size, int64_t bytes, int64_t live) {
  const Source source = source_of(bytes);
  if (source == Source::malloc && process_pages.too_many(live)) [[unlikely]] {
    process_pages.trim(live, seconds_now());
  }
  switch (source) {
    case Source::malloc:
      return std::malloc(size);
    case Source::pages:
      return process_pages.take(size, live, seconds_now());
    case Source::torch:
      return c10::alloc_cpu(size);
  }
  return nullptr;
}

/// Memory for a header and so many bytes, aligned behind it; null where the system has none.
void* aligned_block(int64_t bytes, int64_t live) {
  void* start = take(static_cast<size_t>(bytes) + kAlignment, bytes, live);
  if (start == nullptr) return nullptr;
  const auto behind = reinterpret_cast<uintptr_t>(start) + sizeof(Header);
  auto* data = reinterpret_cast<void*>((behind + kAlignment - 1) / kAlignment * kAlignment);
  header_of(data) = {start, bytes};
  return data;
}

void free_block(void* data, int64_t live) noexcept {
  const auto [start, bytes] = header_of(data);
  switch (source_of(bytes)) {
    case Source::malloc:
      return std::free(start);
    case Source::pages:
      return process_pages.give_back(start, static_cast<size_t>(bytes) + kAlignment, live,
                                     seconds_now());
    case Source::torch:
      return c10::free_cpu(start);
  }
}

void report(void* data, int64_t bytes, int64_t live) {
  c10::reportMemoryUsageToProfiler(data, bytes, static_cast<size_t>(live), 0, cpu());
}

void deallocate(void* data) {
  if (data == nullptr) return;
  const int64_t bytes = header_of(data).bytes;
  const int64_t before = process_counters.live.fetch_sub(bytes, std::memory_order_relaxed);
  if (c10::memoryProfilingEnabled()) [[unlikely]] {
    report(data, -bytes, before - bytes);
  }
  if (process_counters.traces.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    if (EventSink* trace = this_thread.trace) trace->record(data, -bytes);
  }
  free_block(data, before - bytes);
}

[[noreturn]] void throw_refused(int64_t bytes) {
  const int64_t live = process_counters.live.load(std::memory_order_relaxed);
  CpuAccounting::throw_out_of_memory(
      bytes, "infinitybatch: the system refused " + format_bytes(bytes) +
                 " for a tensor on the CPU, where tensors occupy " + format_bytes(live) +
                 "; use smaller micro-batches, or look for a limit on this process (ulimit -v)");
}

/// A block for `bytes` that have been reserved, which made `live` of them.
inline c10::DataPtr make_block(int64_t bytes, int64_t live) {
  void* data = nullptr;
  try {
    data = aligned_block(bytes, live);
  } catch (const std::exception&) {  // c10's own complaint is no OutOfMemoryError
  }
  if (data == nullptr) [[unlikely]] {
    CpuAccounting::release(bytes);
    throw_refused(bytes);
  }
  if (live > process_counters.peak.load(std::memory_order_relaxed)) [[unlikely]] {
    CpuAccounting::raise_process_peak(live);
  }
  c10::DataPtr result{data, data, &deallocate, cpu()};  // owns the block should the profiler throw
  if (c10::memoryProfilingEnabled()) [[unlikely]] {
    report(data, bytes, live);
  }
  return result;
}

/// An allocation that a limit, a scope, a trace or an injected failure may want to see.
[[gnu::noinline]] c10::DataPtr allocate_watched(Thread& thread, int64_t bytes) {
  const int64_t live = CpuAccounting::reserve(thread, bytes);
  c10::DataPtr block = make_block(bytes, live);
  CpuAccounting::raise_scope_peak(thread, live);
  if (thread.trace != nullptr) thread.trace->record(block.get(), bytes);
  return block;
}

[[gnu::noinline]] c10::DataPtr allocate_nothing(size_t size) {
  if (size == 0) return {nullptr, nullptr, &deallocate, cpu()};
  CpuAccounting::throw_out_of_memory(
      static_cast<int64_t>(kMost),
      "infinitybatch: a tensor of " + std::to_string(size) +
          " bytes was asked for on the CPU, more than any machine has; look for a negative or "
          "overflowing size");
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size - 1 >= kMost) [[unlikely]] {
      return allocate_nothing(size);
    }
    const auto bytes = static_cast<int64_t>(size);
    Thread& thread = this_thread;
    int64_t before = process_counters.live.load(std::memory_order_relaxed);
    if (before + bytes <= thread.unwatched_up_to &&
        process_counters.live.compare_exchange_strong(before, before + bytes,
                                                      std::memory_order_relaxed)) [[likely]] {
      return make_block(bytes, before + bytes);
    }
    return allocate_watched(thread, bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

// Never destroyed: tensors in static variables are freed after it would be.
CpuAllocator& cpu_allocator() {
  alignas(CpuAllocator) static char place[sizeof(CpuAllocator)];
  static auto* allocator = new (place) CpuAllocator;
  return *allocator;
}

// Another library's allocator may keep books of its own, which ours would empty: it stays.
const bool installed_at_load = [] {
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;
  Pages::supported();  // before there are other threads, or children
  c10::SetAllocator(c10::DeviceType::CPU, &cpu_allocator());
  return c10::GetCPUAllocator() == &cpu_allocator();
}();

}  // namespace

Counters& CpuAccounting::counters() noexcept {
  return process_counters;
}
Thread& CpuAccounting::thread() noexcept {
  return this_thread;
}

int64_t kept_pages() noexcept {
  return process_pages.kept();
}

void give_kept_pages_back() noexcept {
  process_pages.give_all_back();
}

CpuAllocatorState cpu_allocator_state() noexcept {
  if (!installed_at_load) return CpuAllocatorState::came_too_late;
  return c10::GetCPUAllocator() == &cpu_allocator() ? CpuAllocatorState::counting
                                                    : CpuAllocatorState::replaced;
}

std::string describe(CpuAllocatorState state) {
  switch (state) {
    case CpuAllocatorState::counting:
      return "memory of tensors on the CPU is counted and can be limited";
    case CpuAllocatorState::came_too_late:
      return "memory of tensors on the CPU is neither counted nor limited: another library had "
             "replaced torch's CPU allocator before infinitybatch was loaded; load infinitybatch "
             "first, or give micro_batch_size in place of a memory budget";
    case CpuAllocatorState::replaced:
      return "memory of tensors on the CPU is neither counted nor limited: another library has "
             "replaced infinitybatch's CPU allocator (c10::SetAllocator); keep it from doing so, "
             "or "
             "give micro_batch_size in place of a memory budget";
  }
  throw InvalidArgument("unknown state of the CPU allocator: " +
                        std::to_string(static_cast<int>(state)));
}

void require_cpu_allocator() {
  const CpuAllocatorState state = cpu_allocator_state();
  if (state != CpuAllocatorState::counting) throw StateError(describe(state));
}

}  // namespace infinitybatch::memory
