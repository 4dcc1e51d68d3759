#include "step/boundary_choice.hpp"

#include "core/out_of_memory.hpp"

#include <infinitybatch/core/errors.hpp>

#include <exception>
#include <string>

namespace infinitybatch {

void BoundaryChoice::choose(Setup& setup, int64_t budget) {
  const bool possible = facts_.memory->offloads && facts_.memory->boundaries &&
                        !facts_.options.micro_batch_size &&
                        facts_.options.offload.when == Offload::When::automatic &&
                        setup.strategy.cuts == Strategy::Cuts::whole_batch_ops;
  if (!possible || facts_.memory->compared ||
      !facts_.planner.settled_for(ways_.request(setup, budget)))
    return;
  facts_.memory->compared = true;
  const std::optional<double> offloaded = facts_.planner.plan().predicted_seconds;
  Setup recomputing = setup;
  recomputing.strategy.offload = Strategy::Offloads::nothing;
  recomputing.resources.store = nullptr;
  const std::optional<double> recomputed = rehearse_fewer(recomputing, budget);
  if (!recomputed) {
    facts_.memory->why_offloaded =
        "boundary activations are offloaded: no plan that computes some of them again fits, or "
        "only one size of micro-batches does, which nobody has timed";
    return;
  }
  // Closer times change places from one rehearsal to the next.
  constexpr double kWorthIt = 0.9;
  const bool offload = !offloaded || *recomputed > kWorthIt * *offloaded;
  facts_.memory->why_offloaded =
      std::string("boundary activations are ") +
      (offload ? "offloaded, not computed again" : "computed again, not offloaded") +
      ": rehearsals of a step took " + format_seconds(offloaded.value_or(0)) + " with copies, " +
      format_seconds(*recomputed) + " without";
  if (offload) return;
  facts_.memory->offloads = false;
  facts_.memory->kept = recomputing.strategy.kept;
  setup = recomputing;
}

std::optional<double> BoundaryChoice::rehearse_fewer(Setup& setup, int64_t budget) {
  constexpr int kTries = 4;   // estimates fall short by little
  constexpr int kRounds = 4;  // of a small batch not every size is timed in one rehearsal
  for (int i = 0; i < kTries; ++i) {
    try {
      // The first time with all: that these do not fit is what the planner knows.
      facts_.planner.begin(ways_.request(setup, budget));
      for (int round = 0; i > 0 && round < kRounds; ++round) {
        ways_.rehearse(setup, budget);
        facts_.planner.begin(ways_.request(setup, budget));
        if (facts_.planner.settled() || round + 1 == kRounds) {
          return facts_.planner.plan().predicted_seconds;
        }
      }
    } catch (const BudgetExceeded&) {
    } catch (...) {
      if (!is_out_of_memory(std::current_exception())) throw;
    }
    if (!facts_.keep_fewer_boundaries(setup, budget)) break;
  }
  return std::nullopt;
}

}  // namespace infinitybatch
