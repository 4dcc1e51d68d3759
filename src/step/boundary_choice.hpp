#pragma once

#include "execute/strategy.hpp"
#include "plan/planner.hpp"
#include "step/knowledge.hpp"

#include <infinitybatch/step/options.hpp>

#include <cstdint>
#include <functional>
#include <optional>

namespace infinitybatch {

/// Where boundary activations of the whole batch do not all fit and may be offloaded: whether they
/// are, or some are kept and the others computed again.
struct BoundaryChoice {
  Planner& planner;
  KnownMemory& memory;
  const Options& options;
  int64_t samples = 0;  ///< of the logical batch
  int64_t budget = 0;   ///< bytes
  std::function<Request(const Strategy&)> request;
  std::function<void(const Strategy&)> rehearse;  ///< what the planner wants to know, and undo it

  /// Of what is offloaded because it does not fit, once that is rehearsed: finds out whether
  /// keeping some of it and computing the rest again takes less time.
  void choose(Strategy& strategy);

 private:
  /// Seconds of a step that keeps what fits; nothing where nothing does.
  std::optional<double> rehearse_fewer(Strategy& strategy);
  /// Keeps fewer still, and computes in larger micro-batches, as long as that takes less time.
  double rehearse_larger(Strategy& strategy, double seconds);
  /// Seconds of a step that keeps what the strategy says; nothing where it is not known to fit, or
  /// nobody could time it.
  std::optional<double> rehearsed(const Strategy& strategy);
};

}  // namespace infinitybatch
