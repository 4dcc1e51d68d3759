#pragma once

#include "execute/strategy.hpp"
#include "plan/planner.hpp"
#include "step/knowledge.hpp"

#include <infinitybatch/step/options.hpp>

#include <cstdint>
#include <functional>
#include <optional>

namespace infinitybatch {

/// How many boundary activations of the whole batch are kept, where all of them do not fit, or only
/// beside micro-batches so small that they take more time than computing some of them again; and
/// whether they are offloaded instead.
struct BoundaryChoice {
  Planner& planner;
  KnownMemory& memory;
  const Options& options;
  int64_t samples = 0;  ///< of the logical batch
  int64_t budget = 0;   ///< bytes
  std::function<Request(const Strategy&)> request;
  std::function<void(const Strategy&)> rehearse;  ///< what the planner wants to know, and undo it

  /// Once a plan is settled that keeps or offloads them: finds out whether keeping some of them and
  /// computing the rest again takes less time. Whether steps were rehearsed for that, which may
  /// have passed the budget.
  bool choose(Strategy& strategy);

 private:
  /// Of the plan that the planner has, offloaded or not.
  KnownMemory::Compared compared_now(const Strategy& strategy) const;
  bool is_compared(const Strategy& strategy) const;
  /// Whether there is a settled plan, and what the loss needs is known.
  bool plans(const Strategy& strategy);
  /// Keeps some in place of offloading all; false where that takes no less.
  bool choose_beside_offload(Strategy& strategy, const std::optional<double>& offloaded);
  /// Seconds of a step that keeps what fits; nothing where nothing does.
  std::optional<double> rehearse_fewer(Strategy& strategy);
  /// Keeps fewer still, and computes in larger micro-batches, as long as that takes less time.
  double rehearse_larger(Strategy& strategy, double seconds);
  /// Seconds of a step in micro-batches of at least twice the size, of a fair one first, beside
  /// fewer boundaries; nothing where that takes no less.
  std::optional<double> with_larger(Strategy& strategy, double seconds);
  /// Seconds of a step that keeps what the strategy says; nothing where it is not known to fit, or
  /// nobody could time it.
  std::optional<double> rehearsed(const Strategy& strategy);
};

}  // namespace infinitybatch
