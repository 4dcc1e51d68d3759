#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "data/dataset.hpp"
#include "models/network.hpp"

namespace infinitybatch::app {

/// Means over a split. For text: over all bytes.
struct Scores {
  double loss = 0;      ///< cross entropy in nats
  double accuracy = 0;  ///< share of samples (bytes) whose best score is the right class
};

/// Measures the network on samples that it was not trained on, in slices and without gradient, so
/// that it stays inside whatever limit is in force.
/// \param[in,out] slice samples at once; halved where they do not fit, for the next call too
/// \throws Interrupted between slices; c10::OutOfMemoryError where a single sample does not fit
Scores evaluate(Network& network, const Split& split, c10::Device device, int64_t& slice);

}  // namespace infinitybatch::app
