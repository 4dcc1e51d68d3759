#include "step/waiting_calls.hpp"

#include "step/wrap_run.hpp"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace infinitybatch {
namespace {

/// Another thread's models are left alone: it may be at work with them.
bool is_of_this_thread(Wrapped& wrapped) {
  const std::lock_guard<std::mutex> lock(wrapped.mutex);
  return wrapped.calls_at_work == 0 && wrapped.worker == std::this_thread::get_id();
}

/// Whose memory on `device` a call of `wrapped` may ask for.
std::vector<std::shared_ptr<WrappedCall>> calls_beside(const Wrapped& wrapped, at::Device device,
                                                       int64_t before) {
  std::vector<std::shared_ptr<WrappedCall>> calls = WaitingCalls::all();
  std::erase_if(calls, [&](const std::shared_ptr<WrappedCall>& call) {
    if (call->store != nullptr || call->device != device || call->place >= before) return true;
    return call->wrapped.get() != &wrapped && !is_of_this_thread(*call->wrapped);
  });
  return calls;
}

}  // namespace

WaitingCalls& WaitingCalls::instance() {
  static auto& calls = *new WaitingCalls;  // outlives static holders
  return calls;
}

void WaitingCalls::add(const std::shared_ptr<WrappedCall>& call) {
  WaitingCalls& waiting = instance();
  const std::lock_guard<std::mutex> lock(waiting.mutex_);
  std::erase_if(waiting.calls_, [](const auto& each) { return each.expired(); });
  waiting.calls_.push_back(call);
  call->place = waiting.count_++;
}

int64_t WaitingCalls::count() {
  WaitingCalls& waiting = instance();
  const std::lock_guard<std::mutex> lock(waiting.mutex_);
  return waiting.count_;
}

std::vector<std::shared_ptr<WrappedCall>> WaitingCalls::all() {
  std::vector<std::shared_ptr<WrappedCall>> calls;
  WaitingCalls& waiting = instance();
  const std::lock_guard<std::mutex> lock(waiting.mutex_);
  for (const auto& weak : waiting.calls_) {
    if (auto call = weak.lock()) calls.push_back(std::move(call));
  }
  return calls;
}

// Another thread may be planning with another model: it is left a message, and not disturbed.
void ask_for_room(const BudgetExceeded& refusal, at::Device device) {
  const int64_t needed = refusal.smallest_feasible().value_or(refusal.needed());
  for (const auto& call : WaitingCalls::all()) {
    if (call->differentiated || call->device != device) continue;
    if (!call->is_planned()) {
      if (is_of_this_thread(*call->wrapped)) {
        call->run->leave_room_next_time(refusal.needed() - refusal.limit());
      }
      continue;
    }
    const std::lock_guard<std::mutex> lock(call->wrapped->mutex);
    const int64_t bytes = needed - call->live_before_loss;
    std::optional<RoomAskedFor>& asked = call->wrapped->asked_for_room[call->planner];
    if (asked && asked->begun == call->begun && asked->bytes >= bytes) continue;
    asked = RoomAskedFor{call->piece.plan, call->begun, bytes};
  }
}

void hear_of_room(Wrapped& wrapped, size_t planner) {
  std::optional<RoomAskedFor> asked;
  {
    const std::lock_guard<std::mutex> lock(wrapped.mutex);
    asked = std::exchange(wrapped.asked_for_room[planner], std::nullopt);
  }
  if (!asked || wrapped.begun[planner] != asked->begun) return;
  wrapped.planners[planner].saw_whole_loss(asked->plan, {asked->bytes, /*net=*/0});
}

bool drop_graphs(const Wrapped& wrapped, at::Device device, int64_t before) {
  bool any = false;
  for (const auto& call : calls_beside(wrapped, device, before)) {
    any = call->run->drop_graphs() || any;
  }
  return any;
}

bool drop_boundaries(const Wrapped& wrapped, at::Device device, int64_t before,
                     const WrappedCall* asking) {
  bool any = false;
  for (const auto& call : calls_beside(wrapped, device, before)) {
    if (call.get() != asking) any = call->run->drop_boundaries() || any;
  }
  return any;
}

}  // namespace infinitybatch
