#include "step/kept_boundaries.hpp"

#include <algorithm>

namespace infinitybatch {

int64_t fair_size(int64_t samples) {
  return std::min(samples, std::max(int64_t{32}, samples / 8));
}

/// What micro-batches take beside their boundary activations grows with their size, and small ones
/// take more time: it is tried to keep so much that micro-batches of a fair size fit.
bool keep_fewer(KeptBoundaries& kept, const BoundaryShortage& shortage) {
  const plan::Boundaries& boundaries = shortage.boundaries;
  const int64_t samples = shortage.samples;
  const int64_t now = boundaries.with(kept, samples).bytes;
  const auto keep = [&](int64_t bytes) {
    const auto choice = boundaries.within(std::min(bytes, now - 1), samples);
    if (choice) kept = choice->kept;
    return choice.has_value();
  };
  if (shortage.most) return keep(*shortage.most);
  const auto keep_beside = [&](int64_t size) {
    const auto peak = shortage.planner.peak_at(size);
    return peak && keep(shortage.budget - (*peak - now));
  };
  if (shortage.size) return keep_beside(*shortage.size);
  for (int64_t size = fair_size(samples); size > 0; size /= 2) {
    if (keep_beside(size)) return true;
  }
  // What is estimated here its own rehearsal knows, and says what would be enough.
  const plan::Boundaries::Choice least = boundaries.least(samples);
  if (least.kept == kept) return false;
  kept = least.kept;
  return true;
}

void plan_with(Request& request, const KeptBoundaries& kept,
               const std::optional<plan::Boundaries>& boundaries) {
  request.kept = kept;
  if (boundaries && !request.offloaded) {
    request.waiting_bytes = boundaries->with(kept, request.batch_size).bytes;
  }
  if (!kept) return;
  request.signature += "|keeps";
  for (const int64_t op : *kept) request.signature += " " + std::to_string(op);
}

std::string why_recomputed_or_offloaded(const Plan& plan, const KnownMemory& memory) {
  const std::string kept = plan.explain_kept();
  if (plan.strategy != "cut" || memory.what_compared.empty()) return kept;
  return (kept.empty() ? "" : kept + "; ") + memory.what_compared;
}

}  // namespace infinitybatch
