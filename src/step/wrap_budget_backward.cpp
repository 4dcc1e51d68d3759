#include "core/out_of_memory.hpp"
#include "step/wrap_budget.hpp"
#include "step/wrap_run.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

/// Whom to tell what a call has taken: null where its size was given, or the planner has been asked
/// something else meanwhile. With `Planning`.
Planner* planner_of(WrappedCall& call) {
  if (call.piece.plan.micro_batch_sizes.empty()) return nullptr;
  Wrapped& wrapped = *call.wrapped;
  return wrapped.begun[call.planner] == call.begun ? &wrapped.planners[call.planner] : nullptr;
}

/// What a backward pass tells the planner of its call.
class Afterwards {
 public:
  explicit Afterwards(WrappedCall& call) : call_(call) {
    first_ = !call.differentiated.exchange(true) && call.during_loss != nullptr;
    if (!first_) return;
    const int64_t now = memory::live(call.device);
    int64_t of_inputs = 0;  // gradients of whole inputs, which backward makes
    for (const size_t index : call.wanted_inputs) {
      of_inputs += static_cast<int64_t>(call.inputs.leaves()[index].tensor.nbytes());
    }
    during_loss_ = call.during_loss->peak();
    effect_.net = now - call.live_before_loss + of_inputs;
    effect_.rise = std::max(during_loss_ - call.live_before_loss, effect_.net);
    call.during_loss.reset();
    tell([&](Planner& planner) { planner.saw_whole_loss(call_.piece.plan, effect_); });
  }

  /// The most that was live between the passes; 0 where it was told before.
  int64_t during_loss() const noexcept { return during_loss_; }

  void peak(int64_t bytes) {
    if (!first_) return;
    Measurement measured;
    measured.peak_bytes = bytes;
    tell([&](Planner& planner) { planner.observe(call_.piece, measured); });
  }

 private:
  template <typename Tell>
  void tell(Tell&& tell) {
    const Planning planning(*call_.wrapped);
    if (!planning.allowed()) return;
    if (Planner* const planner = planner_of(call_)) tell(*planner);
  }

  WrappedCall& call_;
  bool first_ = false;
  int64_t during_loss_ = 0;
  MicroBatchProfile::Effect effect_;
};

/// Keeps the peak of the call in its report, whatever becomes of backward.
void note(WrappedCall& call, int64_t restarts) {
  if (!call.high_water) return;
  const std::lock_guard<std::mutex> lock(call.wrapped->mutex);
  call.report->peak_bytes = std::max(call.report->peak_bytes, call.high_water->peak());
  call.report->restarts += restarts;
}

/// A given size cannot become smaller; what waits can leave.
void offload_next_time(const WrappedCall& call) {
  if (call.run->cut() && call.wrapped->options.micro_batch_size) call.run->offload_next_time();
}

std::vector<at::Tensor> run_within_budget(WrappedCall& call,
                                          const std::function<std::vector<at::Tensor>()>& run) {
  const int64_t budget = *call.budget;
  const int64_t before = memory::live(call.device);
  const int64_t with_gradients = before + gradient_bytes(call.leaves, call.device);
  Afterwards afterwards(call);
  const bool can_drop = call.report->retained > 0 && call.store == nullptr;
  if (afterwards.during_loss() > budget && !can_drop) {
    note(call, 0);
    offload_next_time(call);
    call.run->keep_fewer_boundaries(afterwards.during_loss() - budget);
    throw BudgetExceeded(afterwards.during_loss(), budget, std::nullopt,
                         "What comes between forward and backward (the outputs of all samples, the "
                         "loss on them, its gradient)",
                         with_gradients);
  }
  for (int64_t restarts = 0;; ++restarts) {
    const memory::Limit limit(budget, call.device);
    try {
      std::vector<at::Tensor> sums = run();
      memory::Limit::check();
      note(call, restarts);
      if (call.high_water) afterwards.peak(call.high_water->peak());
      return sums;
    } catch (...) {
      note(call, 0);
      if (!is_out_of_memory(std::current_exception())) throw;
      if (!limit.allocation_failed()) throw;
      // `run` has consumed some of what this call kept. Without the rest, wherever it waits:
      const bool kept = restarts == 0 && call.report->retained > 0;
      const bool dropped = call.run->drop_graphs();
      if (!call.run->cut() && (drop_graphs(*call.wrapped) || dropped || kept)) continue;
      const int64_t refused = limit.refused();
      if (refused == 0) throw;  // by the system
      if (call.run->keep_fewer_boundaries(refused - budget)) continue;
      afterwards.peak(refused);
      offload_next_time(call);
      throw BudgetExceeded(std::max(refused, budget + 1), budget, std::nullopt,
                           "backward, beside the " + format_bytes(before) +
                               " that were live when it began (outputs, what the loss holds),",
                           with_gradients);
    }
  }
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

void ask_for_room(const BudgetExceeded& refusal, at::Device device, const Wrapped* planning) {
  const int64_t needed = refusal.smallest_feasible().value_or(refusal.needed());
  for (const auto& call : WaitingCalls::all()) {
    if (call->differentiated || call->device != device) continue;
    std::optional<Planning> mine;
    if (call->wrapped.get() != planning) mine.emplace(*call->wrapped);
    Planner* const planner = !mine || mine->allowed() ? planner_of(*call) : nullptr;
    if (planner == nullptr) continue;
    planner->saw_whole_loss(call->piece.plan, {needed - call->live_before_loss, /*net=*/0});
  }
}

bool drop_graphs(Wrapped& wrapped) {
  bool any = false;
  for (const auto& call : WaitingCalls::all()) {
    if (call->wrapped.get() == &wrapped && call->store == nullptr)
      any = call->run->drop_graphs() || any;
  }
  return any;
}

std::vector<at::Tensor> backward_under_budget(WrappedCall& call,
                                              const std::function<std::vector<at::Tensor>()>& run) {
  try {
    return run_within_budget(call, run);
  } catch (const BudgetExceeded& refusal) {
    ask_for_room(refusal, call.device, nullptr);
    throw;
  }
}

}  // namespace infinitybatch
