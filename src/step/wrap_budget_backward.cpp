#include "core/out_of_memory.hpp"
#include "step/waiting_calls.hpp"
#include "step/wrap_budget.hpp"
#include "step/wrap_run.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

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
    tell([&](Planner& planner) {
      planner.saw_whole_loss(call_.piece.plan, effect_);
      planner.saw_second_pass(now);
    });
  }

  /// The most that was live between the passes; 0 where it was told before.
  int64_t during_loss() const noexcept { return during_loss_; }

  /// The step is over, with this peak. That of a call which has let go of boundary activations, or
  /// kept fewer, is no measure of its plan, which would be taken to fit from then on.
  void succeeded(int64_t peak) {
    if (call_.run->plan().kept_boundaries == call_.piece.plan.kept_boundaries) observe(peak);
  }

  /// The pass has failed for want of memory: so much would have been live.
  void ran_out(int64_t refused) {
    observe(refused);
    tell([&](Planner& planner) { planner.second_pass_ran_out(call_.piece); });
  }

 private:
  void observe(int64_t peak) {
    if (!first_) return;
    Measurement measured;
    measured.peak_bytes = peak;
    tell([&](Planner& planner) { planner.observe(call_.piece, measured); });
  }

  /// Unless the planner has been asked something else meanwhile.
  template <typename Tell>
  void tell(Tell&& tell) {
    if (!call_.is_planned()) return;
    Wrapped& wrapped = *call_.wrapped;
    const Planning planning(wrapped);
    if (!planning.allowed() || wrapped.begun[call_.planner] != call_.begun) return;
    tell(wrapped.planners[call_.planner]);
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
  const int64_t waiting = WaitingCalls::count();
  for (int64_t restarts = 0;; ++restarts) {
    const memory::Limit limit(budget, call.device);
    try {
      std::vector<at::Tensor> sums = run();
      memory::Limit::check();
      note(call, restarts);
      if (call.high_water) afterwards.succeeded(call.high_water->peak());
      return sums;
    } catch (...) {
      note(call, 0);
      if (!is_out_of_memory(std::current_exception())) throw;
      if (!limit.allocation_failed()) throw;
      // `run` has consumed some of what this call kept. Without the rest, wherever it waits:
      const bool kept = restarts == 0 && call.report->retained > 0;
      const bool dropped = call.run->drop_graphs();
      if (!call.run->cut() && (drop_graphs(*call.wrapped, call.device, waiting) || dropped || kept))
        continue;
      const int64_t refused = limit.refused();
      if (refused == 0) throw;  // by the system
      const BudgetExceeded refusal(std::max(refused, budget + 1), budget, std::nullopt,
                                   "backward, beside the " + format_bytes(before) +
                                       " that were live when it began (outputs, what the loss "
                                       "holds),",
                                   with_gradients);
      if (call.run->keep_fewer_boundaries(refused - budget)) continue;
      if (drop_boundaries(*call.wrapped, call.device, waiting, &call) && call.run->begin_anew()) {
        ask_for_room(refusal, call.device);
        continue;
      }
      call.run->give_up();
      afterwards.ran_out(refused);
      offload_next_time(call);
      throw refusal;
    }
  }
}

}  // namespace

std::vector<at::Tensor> backward_under_budget(WrappedCall& call,
                                              const std::function<std::vector<at::Tensor>()>& run) {
  try {
    return run_within_budget(call, run);
  } catch (const BudgetExceeded& refusal) {
    ask_for_room(refusal, call.device);
    throw;
  }
}

}  // namespace infinitybatch
