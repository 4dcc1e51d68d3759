#include "memory/failure_injection.hpp"

#include "memory/cpu_accounting.hpp"
#include "memory/cpu_allocator.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch::memory {

FailAllocation::FailAllocation(int64_t n, bool (*counts)()) : n_(n), counts_(counts) {
  if (n < 1) {
    throw InvalidArgument("FailAllocation counts from 1, but was given " + std::to_string(n));
  }
  require_cpu_allocator();
  if (CpuAccounting::thread().failure != nullptr) {
    throw StateError("this thread has a FailAllocation already; end it first");
  }
  CpuAccounting::set_failure(this);
}

FailAllocation::~FailAllocation() {
  CpuAccounting::set_failure(nullptr);
}

}  // namespace infinitybatch::memory
