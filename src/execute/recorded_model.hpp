#pragma once

#include "execute/setup.hpp"

#include <vector>

namespace infinitybatch {

/// What every recording of a step's model starts from.
struct RecordedModel {
  explicit RecordedModel(const Setup& setup)
      : problem(setup.problem), strategy(setup.strategy), resources(setup.resources) {
    if (streams(problem, strategy)) return;  // nothing is recorded
    buffers = buffers_of(problem);
    devices = devices_of(problem);
  }

  const Problem& problem;
  const Strategy& strategy;
  const Resources& resources;
  std::vector<at::Tensor> buffers;  ///< as the step found them
  std::vector<at::Device> devices;
};

}  // namespace infinitybatch
