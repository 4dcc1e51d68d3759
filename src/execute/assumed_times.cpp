#include "execute/assumed_times.hpp"

#include <mutex>

namespace infinitybatch {
namespace {

std::mutex times_mutex;
std::optional<AssumedTimes> assumed_times;

}  // namespace

void AssumedTimes::set(std::optional<AssumedTimes> times) {
  const std::lock_guard<std::mutex> lock(times_mutex);
  assumed_times = times;
}

std::optional<AssumedTimes> AssumedTimes::get() {
  const std::lock_guard<std::mutex> lock(times_mutex);
  return assumed_times;
}

}  // namespace infinitybatch
