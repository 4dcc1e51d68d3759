#pragma once

#include "step/wrapped_call.hpp"

#include <functional>
#include <memory>
#include <mutex>
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

/// Calls under a budget whose graph still lives, of whichever model: those of a step share a
/// device.
class WaitingCalls {
 public:
  static void add(const std::shared_ptr<WrappedCall>& call);
  static std::vector<std::shared_ptr<WrappedCall>> all();

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<WrappedCall>> calls_;

  static WaitingCalls& instance();
};

/// Tells the plans of calls that wait for their backward what another one needs beside them.
/// \param planning whose planners the caller may ask; may be null
void ask_for_room(const BudgetExceeded& refusal, at::Device device, const Wrapped* planning);
/// Lets go of every graph that any call keeps on the device. False where there was none.
bool drop_graphs(Wrapped& wrapped);

/// Forward of a wrapped model: attempts, until one succeeds.
Batch forward(const std::shared_ptr<Wrapped>& wrapped, Setup setup, const Batch& inputs);

/// Runs a backward pass under the budget of its forward. Where memory runs out, graphs that are
/// kept, of whichever call, are dropped and it runs again.
/// \throws BudgetExceeded where that does not help
std::vector<at::Tensor> backward_under_budget(WrappedCall& call,
                                              const std::function<std::vector<at::Tensor>()>& run);

}  // namespace infinitybatch
