#pragma once

#include "offload/store.hpp"

#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <memory>

namespace infinitybatch {

/// The store that these options ask for, for tensors of `device`.
/// \throws InvalidArgument, OffloadError
std::unique_ptr<offload::Store> make_store(const Offload& offload, at::Device device);

/// What a store did between two moments.
struct OffloadedMeanwhile {
  int64_t bytes = 0;    ///< that left the device, each time counted
  CopySeconds seconds;  ///< of copies, out and back

  OffloadedMeanwhile() = default;
  OffloadedMeanwhile(const offload::StoreStatistics& before, const offload::StoreStatistics& now);
  OffloadedMeanwhile& operator+=(const OffloadedMeanwhile& other) noexcept;
};

}  // namespace infinitybatch
