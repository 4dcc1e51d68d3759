#pragma once

#include "plan/boundaries.hpp"
#include "plan/planner.hpp"
#include "step/knowledge.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace infinitybatch {

/// Boundary activations of the whole batch do not all fit.
struct BoundaryShortage {
  const plan::Boundaries& boundaries;
  const Planner& planner;  ///< was asked for a plan that keeps what is kept now
  int64_t samples = 0;     ///< of the logical batch
  int64_t budget = 0;      ///< bytes
  /// Bytes that boundary activations may take, where the size is given and nothing was planned.
  std::optional<int64_t> most = std::nullopt;
  /// Micro-batches of so many samples shall fit beside them; of a fair size, if left out.
  std::optional<int64_t> size = std::nullopt;
};

/// Samples of a micro-batch that is worth keeping less for.
int64_t fair_size(int64_t samples);

/// Keeps fewer of them, the others are computed again; false where that does not help.
bool keep_fewer(KeptBoundaries& kept, const BoundaryShortage& shortage);

/// What is planned keeps these, of the boundaries that are known.
void plan_with(Request& request, const KeptBoundaries& kept,
               const std::optional<plan::Boundaries>& boundaries);

/// Which boundary activations are kept, and why the others are computed again or offloaded; empty
/// where nobody had to choose.
std::string why_recomputed_or_offloaded(const Plan& plan, const KnownMemory& memory);

}  // namespace infinitybatch
