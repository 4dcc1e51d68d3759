#pragma once

#include <cstdint>
#include <optional>

namespace infinitybatch {

/// For tests: how long micro-batches are taken to have lasted in place of what clocks say, so that
/// the sizes a planner finds fastest are the same on any machine at any load.
struct AssumedTimes {
  double per_micro_batch;  ///< seconds that each costs, whatever its size
  double per_sample;       ///< seconds that each sample adds
  double per_byte = 0;     ///< seconds of copying one to the host or back; clocks say where it is 0

  double seconds(int64_t samples) const {
    return per_micro_batch + per_sample * static_cast<double>(samples);
  }

  /// Of one of the few instructions that a micro-batch is made of.
  double instruction(int64_t samples) const { return seconds(samples) / 4; }

  /// For all threads of the process; empty where clocks count, as they do at first.
  static void set(std::optional<AssumedTimes> times);
  static std::optional<AssumedTimes> get();
};

}  // namespace infinitybatch
