#include <infinitybatch/step/wrap.hpp>

#include "retained.hpp"
#include "wrap_budget.hpp"
#include "wrap_forward.hpp"
#include "wrap_report.hpp"
#include "wrapped_call.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/pinned_copies.hpp>
#include <infinitybatch/core/plain_leaves.hpp>
#include <infinitybatch/core/transforms.hpp>
#include <infinitybatch/execute/outside_loss.hpp>
#include <infinitybatch/step/admission.hpp>
#include <infinitybatch/tape/witness.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

namespace infinitybatch {

namespace {

Batch run(const std::shared_ptr<Wrapped>& wrapped, Job job, const Batch& inputs, int64_t total) {
  if (wrapped->options.memory_budget) return forward_under_budget(wrapped, std::move(job), inputs);
  const int64_t size = *wrapped->options.micro_batch_size;
  const bool one = total <= size;
  if (one && !wrapped->options.agree) {
    auto report = std::make_shared<WrapReport>();
    report->micro_batch_sizes = {total};
    report->strategy = "native";
    Batch outputs = wrapped->model.forward(to_device(inputs, job.device));
    publish(*wrapped, std::move(report));
    return outputs;
  }
  bool coupled = false;
  const auto attempt = [&](const auto& run) {
    ForwardPass pass(wrapped, job, inputs);
    try {
      Batch outputs = run(pass);
      pass.call()->report = report_of(*pass.call(), pass.sizes());
      publish(*wrapped, pass.call()->report);
      return outputs;
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      coupled = pass.saw_coupling();
      pass.roll_back();
      throw;
    }
  };
  std::shared_ptr<offload::Store> store;
  const int64_t retained = wrapped->options.retained_micro_batches;
  const auto stream = [&](ForwardPass& pass) {
    const StoreUse alone(*wrapped, store.get());
    return pass.run({split_by(total, size), one ? 1 : retained, /*overlaps=*/true}, total);
  };
  const auto cut = [&](ForwardPass& pass) {
    const StoreUse alone(*wrapped, store.get());
    return pass.run_cuts(split_for_cuts(total, size), /*overlap=*/true);
  };
  const auto offload = [&] {
    if (wrapped->options.offload.when != Offload::When::always) return;
    store = wrapped->store_on(job.device);
    job.store = store.get();
  };
  const auto offload_graphs = [&] {
    if (retained > 0) offload();
    job.offloads_graphs = retained > 0 && store != nullptr;
  };
  std::atomic<bool>& sees_all = wrapped->sees_whole_batch();
  if (one) {
    offload_graphs();
    return attempt(stream);
  }
  if (wrapped->options.static_graph) {
    offload();
    const Rerunnable rerunnable(inputs);
    try {
      return attempt(cut);
    } catch (const tape::OtherValues&) {
      rerunnable.check();  // each micro-batch is recorded from now on
    }
    return attempt(cut);
  }
  if (sees_all) {
    offload();
    try {
      return attempt(cut);
    } catch (const NothingToCut&) {
      sees_all = false;
    }
  }
  const Rerunnable rerunnable(inputs);
  offload_graphs();
  std::exception_ptr coupling;
  try {
    return attempt(stream);
  } catch (const CouplingError&) {
    if (!coupled) throw;  // a buffer that depends on the samples
    coupling = std::current_exception();
  }
  rerunnable.check();
  job.offloads_graphs = false;
  offload();
  try {
    Batch outputs = attempt(cut);
    sees_all = true;
    return outputs;
  } catch (const NothingToCut&) {
    std::rethrow_exception(coupling);  // compiled code shows no op
  }
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

/// What was measured with what forward leaves joined, or without, holds for that alone.
void forget_plans(Wrapped& wrapped) {
  for (Planner& planner : wrapped.planners) planner = Planner();
  for (GraphChoices& choices : wrapped.graph_choices) choices = GraphChoices();
  wrapped.without_gradients = Planner();
  for (uint64_t& begun : wrapped.begun) ++begun;  // a backward to come tells the old ones nothing
}

/// Where there was no room to join it, somebody else may have held the memory for a while: it is
/// tried again as sizes are (`Planner::may_try_again`).
void try_joining_again(Wrapped& wrapped) {
  constexpr int64_t kFirst = 16;
  constexpr int64_t kMostDoublings = 20;
  if (wrapped.joins_left || wrapped.join_shortages == 0) return;
  const int64_t doublings = std::min<int64_t>(wrapped.join_shortages - 1, kMostDoublings);
  if (++wrapped.calls_unjoined <= kFirst << doublings) return;
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
Batch run_joining(const std::shared_ptr<Wrapped>& wrapped, const Job& job, const Batch& inputs,
                  int64_t total) {
  const Rerunnable rerunnable(inputs);
  wrapped->joining = false;
  try_joining_again(*wrapped);
  bool short_of_memory = false;
  try {
    return run(wrapped, job, inputs, total);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    keep_foreign_exception(error);
    if (!wrapped->joining.exchange(false) || !is_ours(error) || !rerunnable.holds()) throw;
    short_of_memory = ran_short(error);
  }
  wrapped->joins_left = false;
  wrapped->join_shortages = short_of_memory ? wrapped->join_shortages + 1 : 0;
  wrapped->calls_unjoined = 0;
  forget_plans(*wrapped);
  try {
    return run(wrapped, job, inputs, total);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    wrapped->joins_left = true;  // it was not that
    throw;
  }
}

}  // namespace

Wrap::Wrap(Model model, WrapOptions options) : wrapped_(std::make_shared<Wrapped>()) {
  if (options.micro_batch_size && *options.micro_batch_size < 1) {
    throw InvalidArgument("micro_batch_size is " + std::to_string(*options.micro_batch_size) +
                          "; it is a number of samples, 1 or more");
  }
  check_retained(options.retained_micro_batches, options.micro_batch_size.has_value());
  if (options.match_native_rng && options.batch_coupling != BatchCoupling::exact) {
    throw InvalidArgument(
        "match_native_rng=True needs batch_coupling=\"exact\"; leave one of them out");
  }
  if (options.static_graph && options.batch_coupling != BatchCoupling::exact) {
    throw InvalidArgument(
        "static_graph=True computes layers such as BatchNorm over the whole batch, which "
        "batch_coupling=\"per_micro_batch\" forbids; leave one of them out");
  }
  if (!options.micro_batch_size && !options.memory_budget) options.memory_budget = "auto";
  wrapped_->model = std::move(model);
  wrapped_->options = std::move(options);
}

Batch Wrap::forward(const Batch& inputs) const {
  refuse_transforms();
  for (size_t i = 0; i < inputs.leaves().size(); ++i) {
    refuse_tangent("inputs" + inputs.structure()->leaf_name(i), inputs.leaves()[i].tensor);
  }
  const int64_t total = batch_size(inputs, "inputs");
  std::optional<OneThread> alone;
  if (at::GradMode::is_enabled()) alone.emplace(*wrapped_);
  const PinnedCopies copies;
  Job job;
  job.model = &wrapped_->model;
  job.match_native_rng = wrapped_->options.match_native_rng;
  admit_model(job);
  const std::string arguments = identity_of_plain_leaves(inputs);
  job.program = wrapped_->begin_program(arguments);
  const PlainNumbers::Scope remembering(wrapped_->numbers);
  Batch outputs = run_joining(wrapped_, job, inputs, total);
  wrapped_->end_program(arguments);
  return outputs;
}

std::optional<WrapReport> Wrap::last_report() const {
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  if (wrapped_->report == nullptr) return std::nullopt;
  return *wrapped_->report;
}

}  // namespace infinitybatch
