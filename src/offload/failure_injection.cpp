#include "offload/failure_injection.hpp"

#include <infinitybatch/core/errors.hpp>

#include <mutex>
#include <string>

namespace infinitybatch::offload {
namespace {

// A transfer may run in a store's copy thread while the object ends in another.
std::mutex mutex;
FailDisk* in_force = nullptr;

}  // namespace

FailDisk::FailDisk(int64_t n, int error) : n_(n), error_(error) {
  if (n < 1) {
    throw InvalidArgument("FailDisk counts from 1, but was given " + std::to_string(n));
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (in_force != nullptr) throw StateError("there is a FailDisk already; end it first");
  in_force = this;
}

FailDisk::~FailDisk() {
  const std::lock_guard<std::mutex> lock(mutex);
  in_force = nullptr;
}

int FailDisk::next() noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  if (in_force == nullptr) return 0;
  return ++in_force->seen_ == in_force->n_ ? in_force->error_ : 0;
}

}  // namespace infinitybatch::offload
