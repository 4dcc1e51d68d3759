#include "step/step_facts.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>

namespace infinitybatch {

bool StepFacts::keeps_graphs(const Problem& problem, const Strategy& strategy) const {
  return problem.loss.coupled() != nullptr && !strategy.is_cut() && options.micro_batch_size &&
         options.retained_micro_batches > 0;
}

void StepFacts::keep_all_boundaries(Setup& setup) const {
  memory->kept.reset();
  setup.strategy.kept.reset();
}

/// What micro-batches take beside their boundary activations grows with their size, and small ones
/// take more time: it is tried to keep so much that micro-batches of a fair size fit.
bool StepFacts::keep_fewer_boundaries(Setup& setup, int64_t budget) const {
  const plan::Boundaries& boundaries = *memory->boundaries;
  const int64_t samples = setup.problem.batch_size();
  const int64_t fair = std::min(samples, std::max(int64_t{32}, samples / 8));
  const int64_t now = boundaries.with(setup.strategy.kept, samples).bytes;
  const auto keep = [&](int64_t bytes) {
    const auto choice = boundaries.within(std::min(bytes, now - 1), samples);
    if (choice) setup.strategy.kept = choice->kept;
    return choice.has_value();
  };
  if (options.micro_batch_size) return keep(budget - memory::stats(setup.problem.device).live);
  for (int64_t size = fair; size > 0; size /= 2) {
    const auto peak = planner.peak_at(size);
    if (!peak) break;
    if (keep(budget - (*peak - now))) return true;
  }
  // What is estimated here its own rehearsal knows, and says what would be enough.
  const plan::Boundaries::Choice least = boundaries.least(samples);
  if (least.bytes >= now) return false;
  setup.strategy.kept = least.kept;
  return true;
}

std::string StepFacts::why_recomputed_or_offloaded() const {
  const std::string kept = plan.explain_kept();
  if (plan.strategy != "cut" || memory->why_offloaded.empty()) return kept;
  return (kept.empty() ? "" : kept + "; ") + memory->why_offloaded;
}

void StepFacts::check_inputs() const {
  if (!attempt.inputs_written) return;
  throw Unsupported(
      "forward changes its inputs in place, and has to run on them again (to be measured, or "
      "because of a layer that sees the whole batch); write that out of place, as in "
      "x = x - mean. The rows that it ran on are changed");
}

}  // namespace infinitybatch
