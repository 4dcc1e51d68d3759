#pragma once

#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/park/store.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <memory>

namespace infinitybatch {

/// The store that these options ask for, for tensors of `device`.
/// \throws InvalidArgument, ParkingError
std::unique_ptr<park::Store> make_store(const Parking& parking, at::Device device);

/// What a store did between two moments.
struct ParkedMeanwhile {
  int64_t bytes = 0;    ///< that left the device, each time counted
  CopySeconds seconds;  ///< of copies, out and back

  ParkedMeanwhile() = default;
  ParkedMeanwhile(const park::StoreStatistics& before, const park::StoreStatistics& now);
  ParkedMeanwhile& operator+=(const ParkedMeanwhile& other) noexcept;
};

}  // namespace infinitybatch
