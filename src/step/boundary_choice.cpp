#include "step/boundary_choice.hpp"

#include "core/out_of_memory.hpp"
#include "step/kept_boundaries.hpp"

#include <infinitybatch/core/errors.hpp>

#include <exception>
#include <string>

namespace infinitybatch {
namespace {

/// Whether micro-batches of half the size were timed, and took clearly more for each sample: then
/// larger ones may take less than those of the plan.
bool gains_by_size(const Plan& plan) {
  constexpr double kGain = 1.1;
  const int64_t size = plan.micro_batch_size();
  double chosen = 0;
  double smaller = 0;  // of the largest that is at most half as large
  for (const Candidate& each : plan.candidates) {
    if (!each.seconds_per_sample) continue;
    if (each.micro_batch_size == size) chosen = *each.seconds_per_sample;
    if (2 * each.micro_batch_size <= size) smaller = *each.seconds_per_sample;
  }
  return chosen > 0 && smaller > kGain * chosen;
}

}  // namespace

void BoundaryChoice::choose(Strategy& strategy) {
  const bool possible = memory.offloads && memory.boundaries && !options.micro_batch_size &&
                        options.offload.when == Offload::When::automatic &&
                        strategy.cuts == Strategy::Cuts::whole_batch_ops;
  if (!possible || memory.compared || !planner.settled_for(request(strategy))) return;
  memory.compared = true;
  const std::optional<double> offloaded = planner.plan().predicted_seconds;
  Strategy recomputing = strategy;
  recomputing.offload = Strategy::Offloads::nothing;
  const std::optional<double> recomputed = rehearse_fewer(recomputing);
  if (!recomputed) {
    memory.why_offloaded =
        "boundary activations are offloaded: no plan that computes some of them again fits, or "
        "only one size of micro-batches does, which nobody has timed";
    return;
  }
  // Closer times change places from one rehearsal to the next.
  constexpr double kWorthIt = 0.9;
  const bool offload = !offloaded || *recomputed > kWorthIt * *offloaded;
  memory.why_offloaded =
      std::string("boundary activations are ") +
      (offload ? "offloaded, not computed again" : "computed again, not offloaded") +
      ": rehearsals of a step took " + format_seconds(offloaded.value_or(0)) + " with copies, " +
      format_seconds(*recomputed) + " without";
  if (offload) return;
  memory.offloads = false;
  memory.kept = recomputing.kept;
  strategy = recomputing;
}

std::optional<double> BoundaryChoice::rehearse_fewer(Strategy& strategy) {
  constexpr int kTries = 4;  // estimates fall short by little
  try {
    planner.begin(request(strategy));  // that all do not fit is what it knows
  } catch (const BudgetExceeded&) {
  }
  for (int i = 0; i < kTries; ++i) {
    if (!keep_fewer(strategy.kept, {*memory.boundaries, planner, samples, budget})) break;
    if (const auto seconds = rehearsed(strategy)) return rehearse_larger(strategy, *seconds);
  }
  return std::nullopt;
}

double BoundaryChoice::rehearse_larger(Strategy& strategy, double seconds) {
  constexpr double kLess = 0.95;
  for (;;) {
    const Plan plan = planner.plan();
    BoundaryShortage shortage{*memory.boundaries, planner, samples, budget};
    shortage.size = 2 * plan.micro_batch_size();
    Strategy larger = strategy;
    if (!gains_by_size(plan) || *shortage.size > samples || !keep_fewer(larger.kept, shortage))
      return seconds;
    const auto less = rehearsed(larger);
    if (!less || *less > kLess * seconds) return seconds;
    strategy = larger;
    seconds = *less;
  }
}

std::optional<double> BoundaryChoice::rehearsed(const Strategy& strategy) {
  constexpr int kRounds = 4;  // of a small batch not every size is timed in one rehearsal
  try {
    planner.begin(request(strategy));
    for (int round = 0; round < kRounds; ++round) {
      rehearse(strategy);
      if (planner.nothing_fits()) return std::nullopt;
      planner.begin(request(strategy));
      if (planner.settled()) break;
    }
    return planner.plan().predicted_seconds;
  } catch (const BudgetExceeded&) {
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
  }
  return std::nullopt;
}

}  // namespace infinitybatch
