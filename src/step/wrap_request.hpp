#pragma once

#include "plan/planner.hpp"
#include "step/wrap_forward.hpp"
#include "step/wrapped_call.hpp"

#include <cstdint>

namespace infinitybatch {

/// What one call of forward asks its planner for, with what is live now.
Request request_of(Wrapped& wrapped, const Setup& setup, const Batch& inputs, const BatchKind& kind,
                   int64_t budget, bool with_gradients);

/// The plan for `request`, which `planner` has begun. Where nothing is known yet of what comes
/// between forward and backward, as much is left for that as can be, half of the room at most.
/// \throws BudgetExceeded where nothing fits, even with no room left
Piece plan_beside_loss(Planner& planner, const Request& request);

/// With `micro_batch_size=` in place of a plan.
Split given_split(const Setup& setup, const Options& options, int64_t samples);

}  // namespace infinitybatch
