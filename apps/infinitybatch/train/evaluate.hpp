#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"

#include <infinitybatch/core/micro_batch.hpp>

#include <cstdint>
#include <functional>
#include <memory>

namespace infinitybatch::app {

/// Means over a split. For text: over all bytes.
struct Scores {
  double loss = 0;      ///< cross entropy in nats
  double accuracy = 0;  ///< share of samples (bytes) whose best score is the right class
};

/// Measures the network on samples that it was not trained on, in slices and without gradient, so
/// that it stays inside whatever limit is in force.
/// \param slice samples at once; halved where they do not fit
/// \param each  sees each slice's outputs once, in order
/// \param amp   forward under autocast to bfloat16
/// \throws Interrupted between slices; c10::OutOfMemoryError where a single sample does not fit
Scores evaluate(const std::shared_ptr<Network>& network, const Split& split, int64_t slice,
                const std::function<void(const MicroBatch&)>& each = {}, bool amp = false);

}  // namespace infinitybatch::app
