#include "step/step_facts.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch {

bool StepFacts::keeps_graphs(const Problem& problem, const Strategy& strategy) const {
  return problem.loss.coupled() != nullptr && !strategy.is_cut() && options.micro_batch_size &&
         options.retained_micro_batches > 0;
}

void StepFacts::keep_all_boundaries(Setup& setup) const {
  memory->kept.reset();
  setup.strategy.kept.reset();
}

void StepFacts::check_inputs() const {
  if (!attempt.inputs_written) return;
  throw Unsupported(
      "forward changes its inputs in place, and has to run on them again (to be measured, or "
      "because of a layer that sees the whole batch); write that out of place, as in "
      "x = x - mean. The rows that it ran on are changed");
}

}  // namespace infinitybatch
