#pragma once

#include "step/wrapped_call.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace infinitybatch {

/// One thread at a time: planners learn from what they see.
class Planning {
 public:
  explicit Planning(Wrapped& wrapped)
      : wrapped_(wrapped), mine_(!wrapped.planning.exchange(true)) {}
  ~Planning() {
    if (mine_) wrapped_.planning = false;
  }
  Planning(const Planning&) = delete;
  Planning& operator=(const Planning&) = delete;
  bool allowed() const noexcept { return mine_; }

 private:
  Wrapped& wrapped_;
  const bool mine_;
};

/// Forward of a wrapped model: attempts, until one succeeds.
Batch forward(const std::shared_ptr<Wrapped>& wrapped, Setup setup, const Batch& inputs);

/// Runs a backward pass under the budget of its forward. Where memory runs out, graphs that are
/// kept, of whichever call, are dropped and it runs again.
/// \throws BudgetExceeded where that does not help
std::vector<at::Tensor> backward_under_budget(WrappedCall& call,
                                              const std::function<std::vector<at::Tensor>()>& run);

}  // namespace infinitybatch
