#include "wrap_budget.hpp"

#include "meter.hpp"
#include "wrap_cuts.hpp"
#include "wrap_forward.hpp"
#include "wrap_report.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/execute/outside_loss.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/step/admission.hpp>
#include <infinitybatch/tape/witness.hpp>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

int64_t live(at::Device device) {
  return memory::stats(device).live;
}

/// Stands for the caller's loss while sizes are measured: outputs wait for it.
class RehearsedLoss final : public OutsideLoss {
 public:
  void take(Rows /*rows*/, const Batch& outputs) override { outputs_.push_back(detached(outputs)); }
  void compare(Rows /*rows*/, const Batch& /*outputs*/) override {}
  at::Tensor gradient(Rows /*rows*/, size_t /*leaf*/, const at::Tensor& /*output*/) const override {
    return {};
  }
  void collect(Rows /*rows*/, const Batch& /*inputs*/) override {}

 private:
  std::vector<Batch> outputs_;
};

/// The user's part has no loss that a rehearsal could compute.
const CoupledLoss& no_loss() {
  static const CoupledLoss loss = losses::coupled([](const Batch&, const Batch&) -> at::Tensor {
    throw StateError("a rehearsal asked for the loss of a wrapped model");
  });
  return loss;
}

class BudgetedForward {
 public:
  BudgetedForward(const std::shared_ptr<Wrapped>& wrapped, Job job, const Batch& inputs)
      : wrapped_(wrapped),
        options_(wrapped->options),
        inputs_(inputs),
        rows_(BatchSource::from(detached(inputs), "inputs")),
        targets_(targets_source(Batch(), rows_.size)),
        job_(std::move(job)),
        with_gradients_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()),
        planning_(*wrapped),
        high_water_(job_.device),
        counted_(std::make_unique<memory::ForeignStorages>(reachable_tensors(job_))),
        budget_(options_.memory_budget->resolve(job_.device)),
        rerunnable_(inputs) {
    if (!planning_.allowed()) {
      throw StateError(
          "this wrapped model is running already, in another thread or around this call; with a "
          "memory_budget one thread at a time may call it");
    }
    job_.inputs = &rows_;
    job_.targets = &targets_;
    job_.coupled = &no_loss();
    job_.exact_coupling = options_.batch_coupling == BatchCoupling::exact;
    job_.use_tapes = wrapped_->use_tapes;
    job_.interrupt = options_.interrupt;
    job_.nested = true;
    job_.tapes_stay = true;  // the caller may run backward again
    job_.cut = wrapped_->sees_whole_batch() || options_.static_graph;
    if (job_.match_native_rng) {
      draw_laws_ = wrapped_->draw_laws_of(job_);
      job_.draw_laws = &draw_laws_;
    }
    for (const auto& call : calls_of(*wrapped_)) {
      if (!call->differentiated) ++planner_;
    }
    planner_ = std::min(planner_, Wrapped::kCalls - 1);
  }

  Batch run();

 private:
  Planner& planner() {
    return with_gradients_ ? wrapped_->planners[planner_] : wrapped_->without_gradients;
  }
  Request request() const;
  Batch attempt();
  void choose_store();
  bool begin_offload();
  /// Under a plan: whether graphs that wait away from the device are an alternative.
  bool may_offload_graphs() const {
    return job_.store != nullptr && !job_.cut && !options_.micro_batch_size;
  }
  void choose_graphs();
  bool give_up_graphs();
  void answer_coupling();
  void answer_other_segments(int64_t segments);
  /// Larger micro-batches, where a few samples were what forward failed on; false where not.
  bool answer_few_rows();
  /// Where those have no room. \throws BudgetExceeded, the one at work where that is not why
  [[noreturn]] void refuse_budget(const BudgetExceeded& why);
  void rehearse();
  Split choose();
  Split split() const {
    return {piece_.plan.micro_batch_sizes, piece_.plan.retained, piece_.plan.overlaps};
  }
  Batch without_gradients(ForwardPass& pass);
  void answer_out_of_memory(const memory::Limit& limit, bool finishing);

  const std::shared_ptr<Wrapped> wrapped_;
  const WrapOptions& options_;
  std::shared_ptr<offload::Store> store_;  // the job's
  const Batch& inputs_;
  const BatchSource rows_;
  const BatchSource targets_;
  Job job_;
  coupled::DrawLaws draw_laws_;
  const bool with_gradients_;
  const Planning planning_;
  const memory::HighWater high_water_;
  std::unique_ptr<memory::ForeignStorages> counted_;
  const int64_t budget_;
  size_t planner_ = 0;
  Piece piece_;
  bool planned_ = false;    // the planner knows of the attempt at work
  bool finishing_ = false;  // the last attempt failed while outputs were joined
  int64_t restarts_ = 0;
  int64_t failed_rows_ = 0;  // see `FewestRows`; of the last attempt
  const Rerunnable rerunnable_;
  bool uncut_ = false;           // tapes cannot be cut, or need not be
  int changes_ = 0;              // of the number of segments
  std::exception_ptr coupling_;  // why only the whole batch as one micro-batch is exact
};

Request BudgetedForward::request() const {
  Request request;
  request.signature = kind_of(job_) + "|wants ";
  request.dims = lengths_of(job_);
  // Memory depends on whose gradients are wanted, which may change from call to call.
  const auto wants = [&](const at::Tensor& tensor) {
    request.signature += tensor.defined() && tensor.requires_grad() ? '1' : '0';
  };
  for (const Leaf& leaf : inputs_.leaves()) wants(leaf.tensor);
  for (const NamedParameter& parameter : job_.parameters) wants(parameter.tensor);
  request.batch_size = job_.batch_size();
  request.baseline_bytes = live(job_.device);
  request.budget_bytes = budget_;
  request.two_pass = with_gradients_ || job_.cut;
  request.copies_one = true;
  request.measured = !job_.device.is_cpu();
  {
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    request.whole_batch_only = wrapped_->whole_batch_only.contains(program_kind_of(job_));
    request.fails_on = wrapped_->few_rows.failing(program_kind_of(job_));
  }
  request.offloaded = job_.cut ? job_.store != nullptr : job_.offloads_graphs;
  request.offloads_graphs = job_.offloads_graphs;
  if (request.offloads_graphs) request.signature += "|graphs are offloaded";
  if (!job_.cut) return request;
  request.signature += "|cut into " + std::to_string(wrapped_->segments);
  request.segments = wrapped_->segments;
  // Backward takes what waits apart as it goes, so that it could not begin again without graphs.
  request.keeps_graphs = false;
  if (request.offloaded) request.signature += "|offloaded";
  return request;
}

Batch BudgetedForward::run() {
  const FewRows::Step few_rows(wrapped_->few_rows);
  for (;; ++restarts_) {
    rerunnable_.check();
    if (live(job_.device) > budget_ && !drop_graphs(*wrapped_)) {
      throw BudgetExceeded(live(job_.device), budget_, std::nullopt,
                           "What is allocated before forward (parameters, gradients, optimizer "
                           "state, inputs, what other calls keep for their backward)");
    }
    const memory::Limit limit(budget_, job_.device);
    planned_ = false;
    finishing_ = false;
    failed_rows_ = 0;
    try {
      return attempt();
    } catch (const NothingToCut&) {
      uncut_ = true;
      wrapped_->sees_whole_batch() = job_.cut = false;
      --restarts_;
    } catch (const tape::OtherValues&) {
      // Each micro-batch is recorded from now on.
    } catch (const SegmentsChanged& changed) {
      answer_other_segments(changed.segments());
    } catch (const CouplingError&) {
      answer_coupling();
    } catch (const NoRoomToLook&) {
      if (!drop_graphs(*wrapped_)) throw;
    } catch (const BudgetExceeded& error) {
      if (drop_graphs(*wrapped_) || begin_offload() || give_up_graphs()) continue;
      if (coupling_) std::rethrow_exception(coupling_);
      refuse_budget(error);
    } catch (const OffloadError&) {
      if (!give_up_graphs()) throw;
    } catch (...) {
      if (answer_few_rows()) {
        --restarts_;  // nothing has run out of memory
        continue;
      }
      if (!is_out_of_memory(std::current_exception())) throw;
      // The user's own error says nothing of our sizes.
      if (!limit.allocation_failed()) throw;
      if (drop_graphs(*wrapped_)) continue;
      if (options_.micro_batch_size && limit.refused() == 0) throw;
      try {
        answer_out_of_memory(limit, finishing_);
      } catch (const BudgetExceeded& error) {
        if (!begin_offload() && !give_up_graphs()) refuse_budget(error);
      }
    }
  }
}

/// Where what waits at the cuts goes, or graphs that are kept; none where it stays on the device.
void BudgetedForward::choose_store() {
  const bool always = options_.offload.when == Offload::When::always;
  const bool fixed = options_.micro_batch_size.has_value();
  const bool keeps = with_gradients_ && (options_.retained_micro_batches > 0 || !fixed);
  bool offloads = always && (job_.cut || keeps);
  if (!offloads && (job_.cut || (keeps && fixed))) {
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    offloads = wrapped_->offloaded.contains(signature_of(job_));
  }
  store_ = offloads ? wrapped_->store_on(job_.device) : nullptr;
  job_.store = store_.get();
  job_.offloads_graphs = offloads && !job_.cut &&
                         (fixed || wrapped_->graph_choices[planner_].offloads(signature_of(job_)));
}

/// Under a plan, once it is known what the loss needs: whether graphs are offloaded, or run again
/// as far as they do not fit.
void BudgetedForward::choose_graphs() {
  if (!may_offload_graphs() || !planner().settled()) return;
  GraphChoices& choices = wrapped_->graph_choices[planner_];
  const std::string kind = signature_of(job_);
  if (choices.find(kind) != nullptr) return;
  const Request again = request();
  planner().begin(again);
  const Plan plan = planner().two_pass().plan;
  if (!planner().foresees_whole_loss(plan)) return;
  const auto offloaded = [&] {
    job_.offloads_graphs = true;
    return request();
  };
  const auto rehearse_offloaded = [&] {
    job_.offloads_graphs = true;
    rehearse();
  };
  choices.choose(kind, planner(), *store_, plan, again, {offloaded, rehearse_offloaded});
  job_.offloads_graphs = choices.offloads(kind);
}

/// From now on what waits of batches of this kind leaves the device; false where it cannot.
bool BudgetedForward::begin_offload() {
  const bool keeps = with_gradients_ && options_.retained_micro_batches > 0;
  const bool possible =
      options_.offload.when != Offload::When::never &&
      (options_.micro_batch_size ? job_.cut || keeps : job_.cut && planner().smallest_failed());
  if (!possible || job_.store != nullptr) return false;
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  // What was said before and has not helped would not help again.
  return wrapped_->offloaded.insert(signature_of(job_)).second;
}

/// Second forwards instead, where a plan found no room for graphs, on the device or beyond it.
bool BudgetedForward::give_up_graphs() {
  return !options_.micro_batch_size &&
         wrapped_->graph_choices[planner_].give_up(signature_of(job_));
}

/// Called with a CouplingError at work.
void BudgetedForward::answer_coupling() {
  if (options_.static_graph) throw;
  rerunnable_.check();
  if (!job_.cut && !uncut_) {
    job_.cut = true;
    --restarts_;  // nothing has run out of memory
    return;
  }
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  coupling_ = std::current_exception();
  const bool was_cut = std::exchange(job_.cut, false);
  uncut_ = true;
  wrapped_->sees_whole_batch() = false;
  const bool may_try = !options_.micro_batch_size;
  if (!may_try) std::rethrow_exception(coupling_);
  if (was_cut) return;  // the planner has yet to meet the model as it is
  if (!planned_ || !planner().whole_batch_may_fit()) std::rethrow_exception(coupling_);
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  const bool fresh = wrapped_->whole_batch_only.insert(program_kind_of(job_)).second;
  if (!fresh) std::rethrow_exception(coupling_);
}

bool BudgetedForward::answer_few_rows() {
  if (!planned_ || !rerunnable_.holds()) return false;
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  return wrapped_->few_rows.meet(program_kind_of(job_), failed_rows_, rows_.size,
                                 std::current_exception());
}

void BudgetedForward::refuse_budget(const BudgetExceeded& why) {
  const std::lock_guard<std::mutex> lock(wrapped_->mutex);
  const std::string kind = program_kind_of(job_);
  if (wrapped_->few_rows.failing(kind) == 0) throw;
  wrapped_->few_rows.refuse(kind, rows_.size, why);
}

void BudgetedForward::answer_other_segments(int64_t segments) {
  rerunnable_.check();
  wrapped_->segments = segments;
  --restarts_;
  if (++changes_ <= 3) return;
  throw CouplingError("aten::batch_norm",
                      "the model does not run its layers that see the whole batch equally often "
                      "each time; give micro_batch_size alone, put them into eval mode, or accept "
                      "another gradient with batch_coupling=\"per_micro_batch\"");
}

void BudgetedForward::answer_out_of_memory(const memory::Limit& limit, bool finishing) {
  const int64_t needed = std::max(limit.refused(), budget_ + 1);
  if (finishing) {
    throw BudgetExceeded(needed, budget_, std::nullopt,
                         "the outputs of all " + std::to_string(job_.batch_size()) +
                             " samples while they are joined");
  }
  if (options_.micro_batch_size) {
    throw BudgetExceeded(needed, budget_, std::nullopt,
                         "micro_batch_size=" + std::to_string(*options_.micro_batch_size));
  }
  if (!planned_) {
    throw BudgetExceeded(needed, budget_, std::nullopt, "The call, before its first micro-batch,");
  }
  try {
    planner().ran_out_of_memory(needed);
  } catch (const BudgetExceeded&) {
    if (coupling_) std::rethrow_exception(coupling_);
    throw;
  }
}

/// Measures what the planner still wants to know, and undoes it.
void BudgetedForward::rehearse() {
  if (planner().settled_for(request())) return;
  const RngSnapshot random = RngSnapshot::capture(devices_of(job_));
  // A small batch has too few rows to time every size in one pass over them.
  constexpr int kPasses = 8;
  // Inputs want their gradient here too: it occupies memory.
  BatchSource wanting = rows_;
  wanting.rows = [this](int64_t begin, int64_t end) {
    Batch rows = to_device(rows_.rows(begin, end), job_.device);
    for (size_t i = 0; i < rows.leaves().size(); ++i) {
      at::Tensor& tensor = rows.leaves()[i].tensor;
      if (!tensor.defined()) continue;
      tensor = tensor.detach();
      tensor.set_requires_grad(inputs_.leaves()[i].tensor.requires_grad());
    }
    return rows;
  };
  Job job = job_;
  job.inputs = &wanting;
  // What forward leaves beside its outputs occupies memory, too.
  LeftOutputs left(job_.exact_coupling ? options_.left_places : LeftOutputs::Look(), rows_.size,
                   room_for_left(*wrapped_, job_.device), !options_.static_graph);
  Model model = *job_.model;
  model.forward = [&](const Batch& micro) {
    Batch outputs =
        left.with_left(batch_size(micro, "inputs"), [&] { return job_.model->forward(micro); });
    if (left.count() > 0) wrapped_->joining = true;
    return outputs;
  };
  job.model = &model;
  job.waits = may_offload_graphs();  // ways with and without offloading are compared
  // What is recorded here nobody has looked at for leaves that get a gradient: later calls must not
  // use it.
  StaticTapes rehearsed;
  if (options_.static_graph) {
    std::vector<size_t> wanted;
    for (size_t i = 0; i < inputs_.leaves().size(); ++i) {
      const at::Tensor& tensor = inputs_.leaves()[i].tensor;
      if (with_gradients_ && tensor.defined() && tensor.requires_grad()) wanted.push_back(i);
    }
    const std::string kind = kind_of_forward(job, wanted, with_gradients_);
    rehearsed = wrapped_->static_forward_of(job, kind).tapes;
    job.static_tapes = &rehearsed;
  }
  bool examined = wrapped_->is_examined(rows_, job_);
  if (!examined) job.examined = &examined;
  std::optional<RehearsedLoss> loss;
  std::optional<Executor> executor;
  const auto begin = [&] {
    executor.reset();
    if (job.cut) job.outside = &loss.emplace();
    executor.emplace(job);
    executor->look_for_few_rows();
  };
  try {
    for (int pass = 0; pass < kPasses; ++pass) {
      begin();
      planner().begin(request());
      planned_ = true;
      int64_t row = 0;
      while (const std::optional<Piece> piece = planner().next()) {
        planner().observe(*piece, run_planned(*executor, *piece, row, job.device));
        if (job.waits) {
          wrapped_->graph_choices[planner_].add(request(), piece->plan, executor->take_times());
        }
        executor->examine();
        if (examined && job.examined != nullptr) wrapped_->note_examined(rows_, job_);
        row += piece->plan.batch_size;
        rerunnable_.check();
        if (!job.cut) continue;
        // Each piece stands for a whole batch.
        job.check_recordings = false;
        executor->roll_back();
        if (job.match_native_rng) random.restore();
        begin();
      }
      executor->roll_back();
      executor.reset();
      random.restore();
      if (planner().settled()) break;
    }
    wrapped_->keep_draw_laws(job_);
    if (job.check_recordings) return;
    // Nor does the call itself: what a second recording takes is no part of the plan.
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    wrapped_->checked.insert(program_kind_of(job_));
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (executor) {
      failed_rows_ = executor->failed_rows();
      executor->roll_back();
    }
    executor.reset();
    random.restore();
    throw;
  }
}

/// The plan for what is live now.
Split BudgetedForward::choose() {
  Request wanted = request();
  planner().begin(wanted);
  planned_ = true;
  piece_ = planner().two_pass();
  if (with_gradients_ && !planner().foresees_whole_loss(piece_.plan)) {
    // Nothing is known yet of what comes between forward and backward: as much is left as can be,
    // half of the room at most.
    const int64_t room = wanted.budget_bytes - wanted.baseline_bytes;
    for (int64_t left = room / 2; left > room / 64; left /= 2) {
      wanted.budget_bytes = budget_ - left;
      try {
        planner().begin(wanted);
        piece_ = planner().two_pass();
        return split();
      } catch (const BudgetExceeded&) {
        // Not even the smallest micro-batches fit beside so much.
      }
    }
    planner().begin(request());
    piece_ = planner().two_pass();
  }
  return split();
}

Batch BudgetedForward::attempt() {
  rerunnable_.check();  // since an earlier attempt
  choose_store();
  const StoreUse alone(*wrapped_, store_.get());
  const bool rehearsed = with_gradients_ || job_.cut;
  if (rehearsed && !options_.micro_batch_size) {
    rehearse();
    choose_graphs();
    rerunnable_.check();
  }
  // From here on: what a rehearsal needs is no part of the plan.
  auto high_water = std::make_unique<memory::HighWater>(job_.device);
  ForwardPass pass(wrapped_, job_, inputs_);
  pass.measured_by(*high_water);
  const std::shared_ptr<WrappedCall> call = pass.call();
  call->budget = budget_;
  try {
    Batch outputs;
    if (options_.micro_batch_size) {
      piece_ = Piece();
      const int64_t size = *options_.micro_batch_size;
      outputs =
          job_.cut && size < rows_.size
              // Nothing is predicted, and backward could not begin again.
              ? pass.run_cuts(split_for_cuts(rows_.size, size), /*overlap=*/false)
              : pass.run({split_by(rows_.size, size), options_.retained_micro_batches}, rows_.size);
    } else if (job_.cut) {
      const std::vector<int64_t> sizes = choose().sizes;
      outputs = pass.run_cuts(sizes, piece_.plan.overlaps, piece_.plan.segments);
    } else if (with_gradients_) {
      outputs = pass.run(choose(), rows_.size);
    } else {
      outputs = without_gradients(pass);
    }
    memory::Limit::check();
    if (job_.cut) wrapped_->sees_whole_batch() = true;
    call->report = report_of(*call, pass.sizes());
    call->report->memory_budget = budget_;
    if (may_offload_graphs() && call->report->strategy_reason.empty()) {
      const GraphChoice* choice = wrapped_->graph_choices[planner_].find(signature_of(job_));
      if (choice != nullptr) call->report->strategy_reason = choice->reason;
    }
    call->report->predicted_peak_bytes = piece_.plan.predicted_peak_bytes;
    call->report->peak_bytes = high_water_.peak();
    // Of the plan alone, which says nothing of a look at rows that took more.
    const auto& predicted = piece_.plan.predicted_peak_bytes;
    if (pass.looked() && high_water_.peak() > predicted && high_water->peak() <= predicted) {
      call->report->predicted_peak_bytes.reset();
    }
    call->report->restarts = restarts_;
    call->high_water = std::move(high_water);
    call->counted = std::move(counted_);
    publish(*wrapped_, call->report);
    if (with_gradients_) {
      call->piece = piece_;
      call->planner = planner_;
      call->begun = ++wrapped_->begun[planner_];
      const std::lock_guard<std::mutex> lock(wrapped_->mutex);
      wrapped_->calls.push_back(call);
    }
    return outputs;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    finishing_ = pass.finishing();
    failed_rows_ = pass.failed_rows();
    pass.roll_back();
    throw;
  }
}

/// Nothing waits for a backward: the micro-batches that are measured are the real ones.
Batch BudgetedForward::without_gradients(ForwardPass& pass) {
  planner().begin(request());
  planned_ = true;
  const int64_t total = rows_.size;
  int64_t row = 0;
  while (const std::optional<Piece> piece = planner().next()) {
    piece_ = *piece;
    if (piece->settled) return pass.run({piece->plan.micro_batch_sizes, 0}, total);
    const Perform perform = [&](const Instruction& instruction, Rows rows) {
      const Operation operation = instruction.operation;
      if (operation != Operation::forward) return;
      if (rows.size() > 1 && pass.wants_another_size()) {
        pass.run({rows.begin, rows.end - 1}, total);
        rows.begin = rows.end - 1;
      }
      pass.run(rows, total);
    };
    planner().observe(*piece, infinitybatch::run(perform, nullptr, *piece, row, job_.device));
    row += piece->plan.batch_size;
  }
  return pass.finish();
}

}  // namespace

Batch forward_under_budget(const std::shared_ptr<Wrapped>& wrapped, Job job, const Batch& inputs) {
  return BudgetedForward(wrapped, std::move(job), inputs).run();
}

}  // namespace infinitybatch
