#include "parking.hpp"

#include <infinitybatch/memory/host_memory.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {

std::unique_ptr<park::Store> make_store(const Parking& parking, at::Device device) {
  park::StoreOptions options;
  if (parking.host_budget) {
    options.host_bytes = parking.host_budget->resolve(at::kCPU);
  } else if (!device.is_cpu()) {
    options.host_bytes = memory::host_memory().available / 2;
  }
  options.disk = parking.disk;
  options.file.directory = parking.directory;
  options.bandwidth = parking.host_bandwidth;
  return std::make_unique<park::Store>(device, std::move(options));
}

ParkedMeanwhile::ParkedMeanwhile(const park::StoreStatistics& before,
                                 const park::StoreStatistics& now)
    : bytes(now.moved_out - before.moved_out) {
  const double copying = now.seconds_copying - before.seconds_copying;
  const double waited = std::min(now.seconds_waited - before.seconds_waited, copying);
  seconds = {copying - waited, waited};
}

ParkedMeanwhile& ParkedMeanwhile::operator+=(const ParkedMeanwhile& other) noexcept {
  bytes += other.bytes;
  seconds.hidden += other.seconds.hidden;
  seconds.waited += other.seconds.waited;
  return *this;
}

}  // namespace infinitybatch
