#include <infinitybatch/memory/limit.hpp>

#include "core/out_of_memory.hpp"
#include "core/thread_context.hpp"
#include "memory/cpu_accounting.hpp"
#include "memory/cpu_allocator.hpp"
#include "memory/high_water.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

namespace infinitybatch::memory {

Limit::Limit(int64_t bytes, c10::Device device) : bytes_(bytes) {
  if (bytes < 1) {
    throw InvalidArgument("a memory limit of " + std::to_string(bytes) +
                          " bytes was given; it must be at least 1, for example 512 * 1024 * 1024");
  }
  note_refusal({});
  if (!device.is_cpu()) {
    seen_ = std::make_unique<HighWater>(device);
    outer_measured_ = std::exchange(ThreadContext::get().measured_limit, this);
    return;
  }
  require_cpu_allocator();
  outer_ = CpuAccounting::thread().limit;
  CpuAccounting::set_limit(std::min(outer_, bytes));
  CpuAccounting::thread().refused = 0;
  failures_before_ = CpuAccounting::thread().failures;
}

Limit* Limit::passed() {
  Limit* limit = ThreadContext::get().measured_limit;
  while (limit != nullptr && limit->seen_->peak() <= limit->bytes_) limit = limit->outer_measured_;
  return limit;
}

bool Limit::is_passed() {
  return passed() != nullptr;
}

void Limit::check() {
  Limit* const limit = passed();
  if (limit == nullptr) return;
  limit->passed_ = limit->seen_->peak();
  const std::string text = "infinitybatch: " + std::to_string(limit->passed_) +
                           " bytes were live on the device, the limit is " +
                           std::to_string(limit->bytes_);
  note_refusal(text);
  throw c10::OutOfMemoryError(text);
}

std::optional<int64_t> Limit::measured() {
  std::optional<int64_t> least;
  for (const Limit* limit = ThreadContext::get().measured_limit; limit != nullptr;
       limit = limit->outer_measured_) {
    least = std::min(least.value_or(limit->bytes_), limit->bytes_);
  }
  return least;
}

int64_t Limit::refused() const noexcept {
  return seen_ ? passed_ : CpuAccounting::thread().refused;
}

bool Limit::allocation_failed() const noexcept {
  return seen_ || CpuAccounting::thread().failures != failures_before_;
}

int64_t failed_allocations() noexcept {
  return CpuAccounting::thread().failures;
}

Limit::~Limit() {
  if (seen_) {
    ThreadContext::get().measured_limit = outer_measured_;
  } else {
    CpuAccounting::set_limit(outer_);
  }
}

}  // namespace infinitybatch::memory
