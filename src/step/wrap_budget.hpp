#pragma once

#include "wrapped_call.hpp"

#include <functional>
#include <vector>

namespace infinitybatch {

/// Forward of a wrapped model that has a memory budget.
Batch forward_under_budget(const std::shared_ptr<Wrapped>& wrapped, Job job, const Batch& inputs);

/// Runs a backward pass under the budget of its forward. Where memory runs out, graphs that are
/// kept, of whichever call, are dropped and it runs again.
/// \throws BudgetExceeded where that does not help
std::vector<at::Tensor> backward_under_budget(WrappedCall& call,
                                              const std::function<std::vector<at::Tensor>()>& run);

}  // namespace infinitybatch
