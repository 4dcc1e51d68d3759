#include <infinitybatch/memory/limit.hpp>

#include "cpu_accounting.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/cpu_allocator.hpp>

#include <algorithm>

namespace infinitybatch::memory {

Limit::Limit(int64_t bytes) {
  if (bytes < 1) {
    throw InvalidArgument("a memory limit of " + std::to_string(bytes) +
                          " bytes was given; it must be at least 1, for example 512 * 1024 * 1024");
  }
  require_cpu_allocator();
  outer_ = CpuAccounting::thread().limit;
  CpuAccounting::set_limit(std::min(outer_, bytes));
  CpuAccounting::thread().refused = 0;
  failures_before_ = CpuAccounting::thread().failures;
}

int64_t Limit::refused() const noexcept {
  return CpuAccounting::thread().refused;
}

bool Limit::allocation_failed() const noexcept {
  return CpuAccounting::thread().failures != failures_before_;
}

Limit::~Limit() {
  CpuAccounting::set_limit(outer_);
}

}  // namespace infinitybatch::memory
