#include "step/boundary_choice.hpp"

#include "core/out_of_memory.hpp"
#include "step/kept_boundaries.hpp"

#include <infinitybatch/core/errors.hpp>

#include <exception>
#include <string>

namespace infinitybatch {

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
  constexpr int kTries = 4;   // estimates fall short by little
  constexpr int kRounds = 4;  // of a small batch not every size is timed in one rehearsal
  for (int i = 0; i < kTries; ++i) {
    try {
      // The first time with all: that these do not fit is what the planner knows.
      planner.begin(request(strategy));
      for (int round = 0; i > 0 && round < kRounds; ++round) {
        rehearse(strategy);
        planner.begin(request(strategy));
        if (planner.settled() || round + 1 == kRounds) return planner.plan().predicted_seconds;
      }
    } catch (const BudgetExceeded&) {
    } catch (...) {
      if (!is_out_of_memory(std::current_exception())) throw;
    }
    if (!keep_fewer(strategy.kept, {*memory.boundaries, planner, samples, budget})) break;
  }
  return std::nullopt;
}

}  // namespace infinitybatch
