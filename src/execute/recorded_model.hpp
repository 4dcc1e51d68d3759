#pragma once

#include "core/tensor_memory.hpp"
#include "execute/setup.hpp"
#include "tape/recorder.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace infinitybatch {

/// What every recording of a step's model starts from.
struct RecordedModel {
  explicit RecordedModel(const Setup& setup)
      : problem(setup.problem), strategy(setup.strategy), resources(setup.resources) {
    if (streams(problem, strategy)) return;  // nothing is recorded
    buffers = buffers_of(problem);
    devices = devices_of(problem);
    if (!problem.exact_coupling) return;
    tape::Recorder::Storages storages;
    for (const NamedParameter& parameter : problem.parameters) {
      if (auto* storage = storage_of(parameter.tensor)) storages.insert(storage);
    }
    parameters = std::make_shared<const tape::Recorder::Storages>(std::move(storages));
  }

  const Problem& problem;
  const Strategy& strategy;
  const Resources& resources;
  std::vector<at::Tensor> buffers;  ///< as the step found them
  std::vector<at::Device> devices;
  std::shared_ptr<const tape::Recorder::Storages> parameters;  ///< that are put back; may be null
};

}  // namespace infinitybatch
