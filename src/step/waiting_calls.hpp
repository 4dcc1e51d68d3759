#pragma once

#include "step/wrapped_call.hpp"

#include <infinitybatch/core/errors.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace infinitybatch {

/// Calls under a budget whose graph still lives, of whichever model: those of a step share a
/// device.
class WaitingCalls {
 public:
  static void add(const std::shared_ptr<WrappedCall>& call);
  static std::vector<std::shared_ptr<WrappedCall>> all();
  /// So many have come so far.
  static int64_t count();

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<WrappedCall>> calls_;
  int64_t count_ = 0;

  static WaitingCalls& instance();
};

/// What was refused on `device` needs more room than calls that wait for their backward have left:
/// their plans leave as much from the next step on, see `hear_of_room`.
void ask_for_room(const BudgetExceeded& refusal, at::Device device);
/// In front of a plan: what others have asked of the last call of this planner. With `Planning`.
void hear_of_room(Wrapped& wrapped, size_t planner);

/// Lets go of every graph that a call of this model keeps on `device`, or one of another model that
/// this thread has called. False where there was none.
/// \param before the calls that had come by then: what an attempt made itself, the next one makes
///               again
bool drop_graphs(const Wrapped& wrapped, at::Device device, int64_t before);
/// The same of boundary activations of the whole batch, which such a call computes again in its
/// backward.
/// \param asking the call whose backward needs the room, if any: it keeps its own
bool drop_boundaries(const Wrapped& wrapped, at::Device device, int64_t before,
                     const WrappedCall* asking = nullptr);

}  // namespace infinitybatch
