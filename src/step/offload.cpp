#include "step/offload.hpp"

#include "memory/host_memory.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch {

std::unique_ptr<offload::Store> make_store(const Offload& offload, at::Device device) {
  offload::StoreOptions options;
  if (offload.host_budget) {
    options.host_bytes = offload.host_budget->resolve(at::kCPU);
  } else if (!device.is_cpu()) {
    options.host_bytes = memory::host_memory().available / 2;
  }
  options.disk = offload.disk;
  options.file.directory = offload.directory;
  options.bandwidth = offload.host_bandwidth;
  return std::make_unique<offload::Store>(device, std::move(options));
}

OffloadedMeanwhile::OffloadedMeanwhile(const offload::StoreStatistics& before,
                                       const offload::StoreStatistics& now)
    : bytes(now.moved_out - before.moved_out) {
  const double copying = now.seconds_copying - before.seconds_copying;
  const double waited = std::min(now.seconds_waited - before.seconds_waited, copying);
  seconds = {copying - waited, waited};
}

OffloadedMeanwhile& OffloadedMeanwhile::operator+=(const OffloadedMeanwhile& other) noexcept {
  bytes += other.bytes;
  seconds.hidden += other.seconds.hidden;
  seconds.waited += other.seconds.waited;
  return *this;
}

}  // namespace infinitybatch
