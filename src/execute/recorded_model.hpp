#pragma once

#include "execute/setup.hpp"

#include <vector>

namespace infinitybatch {

/// What every recording of a step's model starts from.
struct RecordedModel {
  explicit RecordedModel(const Setup& setup)
      : problem(setup.problem),
        strategy(setup.strategy),
        resources(setup.resources),
        buffers(buffers_of(setup.problem)),
        devices(devices_of(setup.problem)) {}

  const Problem& problem;
  const Strategy& strategy;
  const Resources& resources;
  std::vector<at::Tensor> buffers;  ///< as the step found them
  std::vector<at::Device> devices;
};

}  // namespace infinitybatch
