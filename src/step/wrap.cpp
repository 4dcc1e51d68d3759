#include <infinitybatch/step/wrap.hpp>

#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/in_step.hpp"
#include "core/memory_order.hpp"
#include "core/out_of_memory.hpp"
#include "core/pinned_copies.hpp"
#include "core/plain_leaves.hpp"
#include "core/rng.hpp"
#include "core/thread_context.hpp"
#include "core/transforms.hpp"
#include "core/unwatched.hpp"
#include "coupled/coupling_watch.hpp"
#include "execute/buffer_values.hpp"
#include "execute/carried_state.hpp"
#include "execute/external_loss.hpp"
#include "execute/schedule.hpp"
#include "plan/shortages.hpp"
#include "step/admission.hpp"
#include "step/mark_batch.hpp"
#include "step/options.hpp"
#include "step/sorted_batch.hpp"
#include "step/wrap_budget.hpp"
#include "step/wrap_forward.hpp"
#include "step/wrap_report.hpp"
#include "step/wrapped_call.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

namespace infinitybatch {

namespace {

/// Forward of the whole batch; where it fails, what it has changed is put back. So it is, and
/// nothing is returned, where forward calls a wrapped part: a checkpoint around it would run again
/// in a backward that is nobody's step, where that part computes micro-batches of its own.
std::optional<Batch> run_natively(const Wrapped& wrapped, const Problem& problem,
                                  const Batch& inputs, int64_t total) {
  const Within<&ThreadContext::sees_all> whole(true);
  const Within<&ThreadContext::met_wrapped> none_met(false);
  const auto forward = [&] { return wrapped.model.forward(to_device(inputs, problem.device)); };
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return forward();
  coupled::CouplingWatch watch;
  CarriedState state(watch.memory());
  const BufferValues buffers(problem.buffers);
  const RngSnapshot random = RngSnapshot::capture(devices_of(problem));
  const auto put_back = [&] {
    const Unwatched unwatched;
    state.roll_back();
    buffers.restore();
    random.restore();
  };
  try {
    const CarriedState::Scope stateful(&state, {0, total}, total);
    Batch outputs = forward();
    if (!ThreadContext::get().met_wrapped) return outputs;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    put_back();
    throw;
  }
  put_back();
  return std::nullopt;
}

Batch run(const std::shared_ptr<Wrapped>& wrapped, const Setup& setup, const Batch& inputs,
          int64_t total) {
  const Options& options = wrapped->options;
  const bool native = !options.memory_budget && total <= *options.micro_batch_size &&
                      !wrapped->own.agree && !setup.problem.trimming;
  if (!native || wrapped->holds_wrapped) return forward(wrapped, setup, inputs);
  auto report = std::make_shared<WrapReport>();
  report->micro_batch_sizes = {total};
  report->strategy = "native";
  std::optional<Batch> outputs = run_natively(*wrapped, setup.problem, inputs, total);
  if (!outputs) {
    wrapped->holds_wrapped = true;
    return forward(wrapped, setup, inputs);
  }
  publish(*wrapped, std::move(report));
  if (options.on_micro_batch) options.on_micro_batch({0, total, detached(*outputs), Batch()});
  return *std::move(outputs);
}

bool is_ours(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (...) {
    return is_out_of_memory(error);
  }
}

/// Whether every rank computes its batch at once, as far as ranks ask each other.
bool all_in_one(const Wrapped& wrapped, const Problem& problem, int64_t total) {
  if (!wrapped.own.begin || !at::GradMode::is_enabled()) return true;
  const Options& options = wrapped.options;
  return wrapped.own.begin(!options.memory_budget && total <= *options.micro_batch_size &&
                           !options.static_graph && problem.trimming == nullptr);
}

/// What was measured with what forward leaves joined, or without, holds for that alone.
void forget_plans(Wrapped& wrapped) {
  for (Planner& planner : wrapped.planners) planner = Planner();
  for (GraphChoices& choices : wrapped.graph_choices) choices = GraphChoices();
  wrapped.without_gradients = Planner();
  for (uint64_t& begun : wrapped.begun) ++begun;  // a backward to come tells the old ones nothing
}

/// Where there was no room to join it, somebody else may have held the memory for a while: it is
/// tried again as sizes are.
void try_joining_again(Wrapped& wrapped) {
  if (wrapped.joins_left || wrapped.join_shortages == 0) return;
  if (!plan::is_time_to_try_again(++wrapped.calls_unjoined, wrapped.join_shortages)) return;
  const Planning planning(wrapped);
  if (!planning.allowed()) return;
  wrapped.joins_left = true;
  forget_plans(wrapped);
}

bool ran_short(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const BudgetExceeded&) {
    return true;
  } catch (...) {
    return is_out_of_memory(error);
  }
}

/// What forward leaves beside its outputs is joined where that costs nobody an exact step: else it
/// stays as the last micro-batch leaves it, and is told of.
Batch run_joining(const std::shared_ptr<Wrapped>& wrapped, const Setup& setup, const Batch& inputs,
                  int64_t total) {
  const Rerunnable rerunnable(inputs);
  wrapped->joining = false;
  try_joining_again(*wrapped);
  bool short_of_memory = false;
  const CollectivesSince said;
  try {
    return run(wrapped, setup, inputs, total);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    keep_foreign_exception(error);
    if (!wrapped->joining.exchange(false) || !is_ours(error) || !rerunnable.holds() || said.any()) {
      throw;
    }
    short_of_memory = ran_short(error);
  }
  wrapped->joins_left = false;
  wrapped->join_shortages = short_of_memory ? wrapped->join_shortages + 1 : 0;
  wrapped->calls_unjoined = 0;
  forget_plans(*wrapped);
  try {
    return run(wrapped, setup, inputs, total);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    wrapped->joins_left = true;  // it was not that
    throw;
  }
}

}  // namespace

Wrap::Wrap(Model model, Options options, WrapOptions own) : wrapped_(std::make_shared<Wrapped>()) {
  wrapped_->options = checked_wrap_options(std::move(options));
  wrapped_->own = std::move(own);
  wrapped_->model = std::move(model);
  wrapped_->use_tapes = wrapped_->options.use_tapes;
}

Batch Wrap::forward(const Batch& given) const {
  if (InStep::is()) {
    ThreadContext::get().met_wrapped = true;
    return wrapped_->model.forward(given);
  }
  const InStep running;
  std::optional<Batch> marked;
  if (const auto& dim = wrapped_->options.batch_dim) marked = mark_inputs(given, *dim);
  refuse_transforms();
  std::shared_ptr<Trimming> trimming;
  if (!wrapped_->options.trim.empty()) {
    const Batch& unsorted = marked ? *marked : given;
    trimming = trimming_of(wrapped_->options, unsorted, Batch(), wrapped_->sequences);
    if (!trimming->planned && trimming->changes_nothing()) {
      trimming = nullptr;
    } else {
      marked = trimming->sorted(unsorted);
    }
  }
  const Batch& inputs = marked ? *marked : given;
  for (size_t i = 0; i < inputs.leaves().size(); ++i) {
    refuse_tangent("inputs" + inputs.structure()->leaf_name(i), inputs.leaves()[i].tensor);
  }
  const int64_t total = batch_size(inputs, "inputs");
  std::optional<OneThread> alone;
  if (at::GradMode::is_enabled()) alone.emplace(*wrapped_);
  const PinnedCopies copies;
  Setup setup;
  setup.problem.model = &wrapped_->model;
  setup.problem.match_native_rng = wrapped_->options.match_native_rng;
  setup.problem.exact_coupling = wrapped_->options.batch_coupling == BatchCoupling::exact;
  setup.problem.trimming = std::move(trimming);
  admit_model(setup.problem);
  const std::string arguments = identity_of_plain_leaves(inputs) + layouts_of(inputs);
  setup.problem.program = wrapped_->begin_program(arguments);
  const PlainNumbers::Scope remembering(&wrapped_->numbers);
  Batch outputs;
  const auto call = [&] { outputs = run_joining(wrapped_, setup, inputs, total); };
  if (all_in_one(*wrapped_, setup.problem, total)) {
    call();
  } else {
    without_collectives("forward",
                        "while a rank of process_group splits its batch; run it in the loss, or "
                        "give each rank a micro_batch_size as large as its batch",
                        call);
  }
  wrapped_->end_program(arguments);
  return outputs;
}

std::optional<WrapReport> Wrap::last_report() const {
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  if (wrapped_->report == nullptr) return std::nullopt;
  return *wrapped_->report;
}

}  // namespace infinitybatch
