#pragma once

#include "step/step_facts.hpp"
#include "step/ways.hpp"

#include <cstdint>
#include <optional>

namespace infinitybatch {

/// Where boundary activations of the whole batch do not all fit: whether they leave the device, or
/// some are kept and the others computed again.
class BoundaryChoice {
 public:
  BoundaryChoice(StepFacts& facts, Ways& ways) : facts_(facts), ways_(ways) {}

  /// Of what is offloaded because it does not fit, once that is rehearsed: finds out whether
  /// keeping some of it and computing the rest again takes less time.
  void choose(Setup& setup, int64_t budget);

 private:
  /// Seconds of a step that keeps what fits; nothing where nothing does.
  std::optional<double> rehearse_fewer(Setup& setup, int64_t budget);

  StepFacts& facts_;
  Ways& ways_;
};

}  // namespace infinitybatch
