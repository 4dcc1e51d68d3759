#include <infinitybatch/step/virtual_batch.hpp>

#include "meter.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/rng.hpp>
#include <infinitybatch/coupled/random_draw.hpp>
#include <infinitybatch/memory/foreign_storage.hpp>
#include <infinitybatch/memory/host_memory.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/park/store.hpp>
#include <infinitybatch/plan/checkpoint_planner.hpp>
#include <infinitybatch/plan/planner.hpp>
#include <infinitybatch/step/admission.hpp>
#include <infinitybatch/tape/mismatch.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

using Clock = std::chrono::steady_clock;

/// A model ran another number of ops of the whole batch than the plan was made for.
class SegmentsChanged : public Error {
 public:
  explicit SegmentsChanged(int64_t segments)
      : Error("the plan is for another number of segments"), segments_(segments) {}
  int64_t segments() const noexcept { return segments_; }

 private:
  int64_t segments_;
};

/// Runs a piece of the planner's, whose instructions are for a number of segments.
Measurement run_planned(Executor& executor, const Piece& piece, int64_t row, at::Device device) {
  const Perform perform = [&](const Instruction& instruction, Rows rows) {
    if (instruction.segment >= 0 && executor.segments() != piece.plan.segments) {
      throw SegmentsChanged(executor.segments());
    }
    executor.run(instruction, rows);
  };
  return run(perform, &executor.sinks(), piece, row, device);
}

void append(std::vector<int64_t>& to, const std::vector<int64_t>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

class VirtualBatch::State {
 public:
  State(Model model, Loss loss, Options options)
      : model_(std::move(model)), loss_(std::move(loss)), options_(std::move(options)) {
    if (options_.micro_batch_size && *options_.micro_batch_size < 1) {
      throw InvalidArgument("micro_batch_size is " + std::to_string(*options_.micro_batch_size) +
                            "; it is a number of samples, 1 or more");
    }
    if (options_.retained_micro_batches < 0) {
      throw InvalidArgument("retained_micro_batches is " +
                            std::to_string(options_.retained_micro_batches) +
                            "; it is a number of micro-batches, 0 or more");
    }
    check_checkpoint_options();
    if (!options_.micro_batch_size && !options_.memory_budget) options_.memory_budget = "auto";
    use_tapes_ = options_.use_tapes;
    if (options_.static_graph && !options_.use_tapes) {
      throw InvalidArgument("static_graph uses a tape again, and use_tapes is false");
    }
    if (options_.static_graph && options_.batch_coupling != BatchCoupling::exact) {
      throw InvalidArgument(
          "static_graph takes all micro-batches through layers that see the whole batch together; "
          "it has no batch_coupling=\"per_micro_batch\"");
    }
    const bool own = !options_.use_tapes || options_.batch_coupling != BatchCoupling::exact;
    if (options_.match_native_rng && own) {
      throw InvalidArgument(
          "match_native_rng cuts tapes: no use_tapes=false, no batch_coupling=\"per_micro_batch\"");
    }
  }

  /// One step. Without `hand_out` it is a rehearsal: everything is as it was afterwards.
  StepReport step(const BatchSource& inputs, const BatchSource& targets, bool hand_out);

  Plan plan() const { return plan_; }

 private:
  void check_checkpoint_options() const;
  Job job(const BatchSource& inputs, const BatchSource& targets) const;
  /// Those of this kind of batch; empty where parameters or buffers are other tensors now.
  StaticTapes* static_tapes(const Job& job) const;
  StepReport attempt(const Job& job, const std::optional<int64_t>& budget, bool hand_out);
  /// Records, and then follows the plan that the recordings ask for.
  void follow_cuts(Executor& executor, const Job& job, std::vector<int64_t> sizes, bool hand_out);
  void follow_fixed_size(Executor& executor, const Job& job, bool hand_out, StepReport& report);
  /// Measures what the planner still wants to know of a coupled loss's micro-batches, and undoes
  /// it.
  /// Whether the first recording was checked on the way.
  bool rehearse(const Job& job, int64_t budget);
  Request request(const Job& job, int64_t budget) const;
  void follow_planner(Executor& executor, const Job& job, int64_t budget, bool hand_out,
                      StepReport& report);
  /// Makes the planner plan smaller, or throws what the user should see.
  void answer_out_of_memory(int64_t needed, int64_t budget);
  /// Micro-batch by micro-batch, each of them segment by segment.
  void follow_checkpoints(Executor& executor, const Job& job, const std::optional<int64_t>& budget,
                          bool hand_out, StepReport& report);
  /// From now on batches of this kind are computed so; false where they cannot be.
  bool begin_checkpoints(Job& job);
  /// From now on what waits of batches of this kind leaves the device; false where it cannot.
  bool begin_parking(Job& job);
  /// The last rung, where nothing may be parked: frontiers are computed again instead.
  bool begin_forgetting(CheckpointPlanner& planner) const;
  bool plan_smaller(Job& job) { return begin_checkpoints(job) || begin_parking(job); }
  park::Store* store(at::Device device) const;
  /// Whether cutting the tapes, or giving it up again, may be exact.
  bool answer_by_cuts(Job& job);
  void answer_coupling(const Job& job);
  /// \throws Unsupported where forward has to run again on inputs that it has changed
  void check_inputs() const;

  Model model_;
  bool has_penalty() const {
    const auto* separable = std::get_if<SeparableLoss>(&loss_);
    return separable != nullptr && separable->has_penalty();
  }

  Loss loss_;
  Options options_;
  Planner planner_;
  Plan plan_;
  bool use_tapes_ = true;
  std::array<bool, 2> cut_{};    // in eval, in training: ops of the model see the whole batch
  bool inputs_written_ = false;  // by forward, in the last attempt
  bool uncut_ = false;           // this model's tapes cannot be cut
  mutable std::map<std::string, StaticTapes> static_tapes_;  // by kind of batch
  /// Kinds of batches one sample of which does not fit.
  mutable std::map<std::string, CheckpointPlanner> checkpoints_;
  std::set<std::string> parked_;  // kinds of batches what waits of which does not fit
  mutable std::unique_ptr<park::Store> store_;
  mutable std::map<std::string, coupled::DrawLaws> draw_laws_;  // by kind of batch
  std::set<std::string> checked_;  // kinds of batches whose recordings were checked
  int64_t segments_ = 1;           // of the cut tapes that were recorded last
  bool failed_in_loss_ = false;    // the last attempt, in the loss of all outputs
  bool planning_ = false;          // the planner knows of the attempt at work
  std::exception_ptr coupling_;    // why only the whole batch as one micro-batch is exact
};

StaticTapes* VirtualBatch::State::static_tapes(const Job& job) const {
  StaticTapes& tapes = static_tapes_[signature_of(job)];
  std::vector<const void*> owned;
  for (const NamedParameter& each : job.parameters) {
    owned.push_back(each.tensor.unsafeGetTensorImpl());
  }
  for (const BufferSlot& slot : job.buffers) owned.push_back(slot.get().unsafeGetTensorImpl());
  if (tapes.owned != owned) tapes = StaticTapes{{}, std::move(owned)};
  return &tapes;
}

Job VirtualBatch::State::job(const BatchSource& inputs, const BatchSource& targets) const {
  Job job;
  job.model = &model_;
  job.loss = std::get_if<SeparableLoss>(&loss_);
  job.coupled = std::get_if<CoupledLoss>(&loss_);
  job.use_tapes = use_tapes_;
  job.cut = cut_[model_.is_training()];
  job.inputs = &inputs;
  job.targets = &targets;
  job.exact_coupling = options_.batch_coupling == BatchCoupling::exact;
  job.keep_outputs = options_.keep_outputs;
  job.on_micro_batch = options_.on_micro_batch;
  job.interrupt = options_.interrupt;
  if (options_.loss_scale) job.loss_scale = options_.loss_scale();
  admit(job);
  if (options_.static_graph) {
    job.cut = true;
    job.static_tapes = static_tapes(job);
  }
  const bool checkpointed = checkpoints_.contains(signature_of(job));
  if (!job.cut && (options_.checkpoint_segments || checkpointed)) {
    job.cut = true;
    job.checkpoints = &checkpoints_[signature_of(job)];
  }
  const bool parks = options_.parking.when == Parking::When::always ||
                     (job.cut && parked_.contains(signature_of(job)));
  if (job.cut && parks) job.store = store(job.device);
  if (job.cut) job.check_recordings = !checked_.contains(kind_of(job));
  job.match_native_rng = options_.match_native_rng;
  if (job.match_native_rng) job.draw_laws = &draw_laws_[kind_of_draws(job)];
  return job;
}

StepReport VirtualBatch::State::step(const BatchSource& inputs, const BatchSource& targets,
                                     bool hand_out) {
  const Clock::time_point start = Clock::now();
  Job job = this->job(inputs, targets);
  const memory::ForeignStorages counted(reachable_tensors(job));
  const memory::PeakScope peak(job.device);
  std::optional<int64_t> budget;
  if (options_.memory_budget) budget = options_.memory_budget->resolve(job.device);
  if (const int64_t live = memory::stats(job.device).live; budget && live > *budget) {
    throw BudgetExceeded(live, *budget, std::nullopt,
                         "what is on the device before the step (parameters, gradients, optimizer "
                         "state, inputs)");
  }

  int changes = 0;  // of the number of segments
  for (int64_t restarts = 0;; ++restarts) {
    // The CPU's limit is enforced; an accelerator's is kept by the plan alone. One for each
    // attempt, so that it tells what failed in this one.
    std::optional<memory::Limit> limit;
    const auto parked_before =
        job.store != nullptr ? job.store->statistics() : park::StoreStatistics();
    if (budget && job.device.is_cpu()) limit.emplace(*budget);
    try {
      StepReport report = attempt(job, budget, hand_out);
      report.peak_bytes = peak.peak();
      if (job.store != nullptr) {
        const park::StoreStatistics now = job.store->statistics();
        plan_.parks = true;
        plan_.parked_bytes = report.parked_bytes = now.moved_out - parked_before.moved_out;
        plan_.parked_seconds = now.seconds_waited - parked_before.seconds_waited;
      }
      report.memory_budget = budget;
      report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      report.restarts = restarts;
      return report;
    } catch (const tape::Mismatch&) {
      check_inputs();
      // From now on this model's forward runs again instead.
      use_tapes_ = false;
      job.use_tapes = false;
    } catch (const SegmentsChanged& changed) {
      check_inputs();
      segments_ = changed.segments();
      --restarts;
      if (++changes > 3) {
        throw CouplingError("aten::batch_norm",
                            "the model does not run its layers that see the whole batch equally "
                            "often each time; give micro_batch_size, put them into eval mode, or "
                            "accept another gradient with batch_coupling=\"per_micro_batch\"");
      }
    } catch (const CouplingError&) {
      if (!options_.micro_batch_size || !job.cut) check_inputs();
      if (job.checkpoints != nullptr) {
        // The layer was not met before memory ran out: one cannot be cut in both ways.
        if (options_.checkpoint_segments) throw;
        job.checkpoints = nullptr;
        job.store = nullptr;
        job.cut = false;
        checkpoints_.erase(signature_of(job));
      }
      if (!answer_by_cuts(job)) answer_coupling(job);
      // Nothing has run out of memory: not a restart that the report should count.
      --restarts;
    } catch (const BudgetExceeded&) {
      if (!plan_smaller(job)) throw;
    } catch (...) {
      if (!budget || !is_out_of_memory(std::current_exception())) throw;
      // The user's own error says nothing of our sizes. A fixed size cannot be answered by a
      // smaller one: there even what the system refused comes back as it is.
      if (limit && !limit->allocation_failed()) throw;
      if (options_.micro_batch_size && limit && limit->refused() == 0) throw;
      check_inputs();
      const int64_t needed = limit ? limit->refused() : *budget + 1;
      if (job.checkpoints != nullptr) {
        CheckpointPlanner& planner = checkpoints_[signature_of(job)];
        if (!planner.ran_out_of_memory() && !begin_parking(job) && !begin_forgetting(planner)) {
          throw BudgetExceeded(std::max(needed, *budget + 1), *budget, std::nullopt,
                               "the smallest segment of a single sample, beside what waits for it "
                               "and the gradients of the parameters");
        }
        continue;
      }
      try {
        answer_out_of_memory(needed, *budget);
      } catch (const BudgetExceeded&) {
        if (!plan_smaller(job)) throw;
      }
    }
  }
}

StepReport VirtualBatch::State::attempt(const Job& job, const std::optional<int64_t>& budget,
                                        bool hand_out) {
  planning_ = false;
  const RngSnapshot random = RngSnapshot::capture(devices_of(job));
  Job checked;
  std::optional<Executor> executor;
  try {
    StepReport report;
    inputs_written_ = false;
    checked = job;
    const bool rehearsed = job.coupled != nullptr || (job.cut && job.checkpoints == nullptr);
    if (rehearsed && !options_.micro_batch_size) {
      if (rehearse(job, *budget)) checked.check_recordings = false;
      random.restore();
    }
    executor.emplace(checked);
    if (job.checkpoints != nullptr) {
      follow_checkpoints(*executor, job, budget, hand_out, report);
    } else if (options_.micro_batch_size) {
      follow_fixed_size(*executor, job, hand_out, report);
    } else {
      follow_planner(*executor, job, *budget, hand_out, report);
    }
    if (!hand_out) {
      inputs_written_ = executor->wrote_inputs();
      executor->roll_back();
      random.restore();
      check_inputs();
    }
    report.loss = executor->loss();
    report.outputs = executor->take_outputs();
    report.strategy = plan_.strategy;
    if (const auto opaque = executor->opaque()) {
      report.strategy = "rerun";
      report.strategy_reason = options_.use_tapes ? *opaque : "use_tapes=false was given";
    }
    return report;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    failed_in_loss_ = executor && executor->in_whole_loss();
    if (executor) {
      inputs_written_ = inputs_written_ || executor->wrote_inputs();
      executor->roll_back();
    }
    random.restore();
    throw;
  }
}

namespace {

/// A rehearsal leaves out the last instruction.
Piece prepare(Piece piece, bool hand_out) {
  auto& instructions = piece.plan.instructions;
  if (!hand_out && instructions.back().operation == Operation::hand_out) instructions.pop_back();
  return piece;
}

}  // namespace

void VirtualBatch::State::follow_fixed_size(Executor& executor, const Job& job, bool hand_out,
                                            StepReport& report) {
  std::vector<int64_t> sizes = split_by(job.batch_size(), *options_.micro_batch_size);
  if (job.cut) {
    follow_cuts(executor, job, std::move(sizes), hand_out);
    report.micro_batch_sizes = plan_.micro_batch_sizes;
    return;
  }
  if (job.coupled != nullptr) {
    const int64_t count = static_cast<int64_t>(sizes.size());
    plan_ = two_pass_plan(std::move(sizes), std::min(options_.retained_micro_batches, count));
  } else {
    plan_ = stream_plan(std::move(sizes), has_penalty());
  }
  plan_.baseline_bytes = memory::stats(job.device).live;
  plan_.reason = "micro_batch_size=" + std::to_string(*options_.micro_batch_size) + " was given";
  Piece piece;
  piece.plan = plan_;
  piece.settled = true;
  run(executor, prepare(std::move(piece), hand_out), 0, job.device);
  report.micro_batch_sizes = plan_.micro_batch_sizes;
}

void VirtualBatch::State::follow_cuts(Executor& executor, const Job& job,
                                      std::vector<int64_t> sizes, bool hand_out) {
  // Layers may refuse a single sample left over.
  if (sizes.back() == 1 && sizes.front() > 2) sizes = split_evenly(job.batch_size(), sizes.front());
  const auto count = static_cast<int64_t>(sizes.size());
  const int64_t retained = std::min(options_.retained_micro_batches, count);
  const auto plan = [&](int64_t segments) {
    return cut_plan(sizes, segments, retained, job.coupled != nullptr, has_penalty());
  };
  Piece piece;
  piece.settled = true;
  piece.plan = plan(/*segments=*/1);
  piece.plan.instructions.resize(sizes.size());  // the recordings
  plan_ = piece.plan;
  run(executor, piece, 0, job.device);
  piece.plan = plan(executor.segments());
  plan_ = piece.plan;
  plan_.baseline_bytes = memory::stats(job.device).live;
  auto& instructions = piece.plan.instructions;
  instructions.erase(instructions.begin(), instructions.begin() + count);
  run(executor, prepare(std::move(piece), hand_out), 0, job.device);
  checked_.insert(kind_of(job));
}

void VirtualBatch::State::follow_checkpoints(Executor& executor, const Job& job,
                                             const std::optional<int64_t>& budget, bool hand_out,
                                             StepReport& report) {
  CheckpointPlanner& planner = checkpoints_[signature_of(job)];
  const int64_t baseline = memory::stats(job.device).live;
  int64_t gradients = 0;  // their sums, which the first micro-batch leaves behind
  for (const NamedParameter& each : job.parameters) {
    if (each.tensor.requires_grad()) gradients += static_cast<int64_t>(each.tensor.nbytes());
  }
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 4;
  planner.begin(budget ? *budget - baseline - gradients : kUnlimited, job.store != nullptr,
                options_.checkpoint_segments);
  std::vector<int64_t> sizes = split_by(job.batch_size(), options_.micro_batch_size.value_or(1));
  std::vector<int64_t> segments;
  const memory::PeakScope peak(job.device);
  int64_t row = 0;
  const auto follow = [&](Plan plan, size_t from, size_t left_out) {
    Piece piece;
    piece.settled = true;
    auto& instructions = plan.instructions;
    instructions.erase(instructions.begin(), instructions.begin() + static_cast<int64_t>(from));
    instructions.resize(instructions.size() - left_out);
    piece.plan = std::move(plan);
    run(executor, piece, row, job.device);
  };
  for (const int64_t size : sizes) {
    Plan recording = checkpoint_plan({size}, {0}, /*penalty=*/false);
    follow(std::move(recording), 0, 1);
    segments.push_back(executor.segments(Rows{row, row + size}));
    const bool last = segments.size() == sizes.size();
    Plan rest = checkpoint_plan({size}, {segments.back()}, last && has_penalty());
    follow(std::move(rest), 1, last && hand_out ? 0 : 1);
    row += size;
  }
  planner.measured(peak.peak() - baseline - gradients);
  plan_ = checkpoint_plan(sizes, segments, has_penalty());
  plan_.baseline_bytes = baseline;
  plan_.budget_bytes = budget;
  plan_.predicted_peak_bytes = baseline + gradients + planner.estimate();
  plan_.reason =
      options_.checkpoint_segments
          ? "checkpoint_segments=" + std::to_string(*options_.checkpoint_segments) + " was given"
          : "the graph of a single sample does not fit";
  report.predicted_peak_bytes = plan_.predicted_peak_bytes;
  report.micro_batch_sizes = std::move(sizes);
}

void VirtualBatch::State::check_checkpoint_options() const {
  if (!options_.checkpoint_segments) return;
  const std::string given =
      "checkpoint_segments is " + std::to_string(*options_.checkpoint_segments);
  if (*options_.checkpoint_segments < 2) {
    throw InvalidArgument(given + "; it is a number of segments, 2 or more");
  }
  if (!options_.micro_batch_size) {
    throw InvalidArgument(given +
                          " without micro_batch_size; a plan for a memory_budget chooses "
                          "the segments itself");
  }
  if (std::holds_alternative<CoupledLoss>(loss_)) {
    throw InvalidArgument(given + " with a coupled loss; it is offered for separable losses");
  }
  if (options_.static_graph || !options_.use_tapes) {
    throw InvalidArgument(given + " together with static_graph or use_tapes=false");
  }
}

bool VirtualBatch::State::begin_checkpoints(Job& job) {
  const bool possible = !options_.micro_batch_size && job.coupled == nullptr && !job.cut &&
                        options_.use_tapes && job.exact_coupling && !coupling_;
  if (!possible || job.checkpoints != nullptr) return false;
  job.cut = true;
  job.checkpoints = &checkpoints_[signature_of(job)];
  if (options_.parking.when == Parking::When::always) job.store = store(job.device);
  return true;
}

bool VirtualBatch::State::begin_parking(Job& job) {
  const bool possible = job.cut && options_.parking.when != Parking::When::never;
  if (!possible || job.store != nullptr) return false;
  parked_.insert(signature_of(job));
  job.store = store(job.device);
  return true;
}

bool VirtualBatch::State::begin_forgetting(CheckpointPlanner& planner) const {
  const bool parks = options_.parking.when != Parking::When::never;
  if (planner.forget || parks || options_.checkpoint_segments) return false;
  planner.begin_forgetting();
  return true;
}

park::Store* VirtualBatch::State::store(at::Device device) const {
  if (!store_ || store_->device() != device) {
    const Parking& parking = options_.parking;
    park::StoreOptions options;
    if (parking.host_budget) {
      options.host_bytes = parking.host_budget->resolve(at::kCPU);
    } else if (!device.is_cpu()) {
      options.host_bytes = memory::host_memory().available / 2;
    }
    options.disk = parking.disk;
    options.file.directory = parking.directory;
    options.bandwidth = parking.host_bandwidth;
    store_ = std::make_unique<park::Store>(device, std::move(options));
  }
  return store_.get();
}

Request VirtualBatch::State::request(const Job& job, int64_t budget) const {
  Request request;
  request.signature = kind_of(job);
  if (job.cut) request.signature += "|cut into " + std::to_string(segments_);
  request.parked = job.store != nullptr;
  if (request.parked) request.signature += "|parked";
  request.dims = lengths_of(job);
  request.batch_size = job.batch_size();
  request.baseline_bytes = memory::stats(job.device).live;
  request.budget_bytes = budget;
  request.penalty = has_penalty();
  request.two_pass = job.coupled != nullptr || job.cut;
  request.whole_loss = job.coupled != nullptr;
  request.segments = job.cut ? segments_ : 0;
  return request;
}

bool VirtualBatch::State::rehearse(const Job& job, int64_t budget) {
  Job quiet = job;
  quiet.on_micro_batch = nullptr;
  quiet.keep_outputs = false;
  // A small batch has too few rows to time every size in one pass over them.
  constexpr int kPasses = 8;
  const RngSnapshot random = RngSnapshot::capture(devices_of(job));
  std::optional<Executor> executor;
  try {
    for (int pass = 0; pass < kPasses; ++pass) {
      executor.emplace(quiet);
      planner_.begin(request(quiet, budget));
      planning_ = true;
      int64_t row = 0;
      while (const std::optional<Piece> piece = planner_.next()) {
        planner_.observe(*piece, run_planned(*executor, *piece, row, job.device));
        row += piece->plan.batch_size;
        inputs_written_ = executor->wrote_inputs();
        check_inputs();
        if (!job.cut) continue;
        // Each piece stands for a whole batch.
        quiet.check_recordings = false;
        executor->roll_back();
        if (job.match_native_rng) random.restore();
        executor.emplace(quiet);
      }
      executor->roll_back();
      executor.reset();
      if (planner_.settled()) break;
    }
    return job.check_recordings && !quiet.check_recordings;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (executor) executor->roll_back();
    throw;
  }
}

void VirtualBatch::State::follow_planner(Executor& executor, const Job& job, int64_t budget,
                                         bool hand_out, StepReport& report) {
  planner_.begin(request(job, budget));
  planning_ = true;
  if (job.coupled != nullptr || job.cut) {
    const Piece piece = prepare(planner_.two_pass(), hand_out);
    report.micro_batch_sizes = piece.plan.micro_batch_sizes;
    report.predicted_peak_bytes = piece.plan.predicted_peak_bytes;
    plan_ = piece.plan;
    planner_.observe(piece, run_planned(executor, piece, 0, job.device));
    if (job.cut) checked_.insert(kind_of(job));
    plan_ = planner_.plan();
    return;
  }
  int64_t row = 0;
  while (std::optional<Piece> piece = planner_.next()) {
    append(report.micro_batch_sizes, piece->plan.micro_batch_sizes);
    // Set where one settled plan is the whole step, be it for the first time at this baseline.
    report.predicted_peak_bytes = piece->plan.predicted_peak_bytes;
    const int64_t rows = piece->plan.batch_size;
    *piece = prepare(std::move(*piece), hand_out);
    planner_.observe(*piece, run(executor, *piece, row, job.device));
    row += rows;
  }
  plan_ = planner_.plan();
}

void VirtualBatch::State::answer_out_of_memory(int64_t needed, int64_t budget) {
  if (options_.micro_batch_size) {
    throw BudgetExceeded(needed, budget, std::nullopt,
                         "micro_batch_size=" + std::to_string(*options_.micro_batch_size));
  }
  if (!planning_) {
    throw BudgetExceeded(std::max(needed, budget + 1), budget, std::nullopt,
                         "what the step holds before its first micro-batch");
  }
  try {
    planner_.ran_out_of_memory(needed, failed_in_loss_);
  } catch (const BudgetExceeded&) {
    if (coupling_) std::rethrow_exception(coupling_);
    throw;
  }
}

void VirtualBatch::State::check_inputs() const {
  if (!inputs_written_) return;
  throw Unsupported(
      "forward changes its inputs in place, and has to run on them again (to be measured, or "
      "because "
      "of a layer that sees the whole batch); write that out of place, as in x = x - mean. The "
      "rows "
      "that it ran on are changed");
}

bool VirtualBatch::State::answer_by_cuts(Job& job) {
  bool& cut = cut_[model_.is_training()];
  if (!job.cut && job.exact_coupling && !uncut_) {
    job.cut = cut = true;
    if (options_.parking.when == Parking::When::always) job.store = store(job.device);
    return true;
  }
  if (!job.cut || options_.micro_batch_size || options_.static_graph) return false;
  // What forward does between the ops of the whole batch cannot be cut. As one micro-batch it needs
  // not be.
  coupling_ = std::current_exception();
  uncut_ = true;
  job.cut = cut = false;
  return true;
}

void VirtualBatch::State::answer_coupling(const Job& job) {
  // The whole batch as one micro-batch couples nothing. Without an enforced limit trying it could
  // pass the budget.
  const bool may_try = !options_.micro_batch_size && job.device.is_cpu();
  if (!coupling_) coupling_ = std::current_exception();
  if (!may_try || !planner_.try_whole_batch()) std::rethrow_exception(coupling_);
}

VirtualBatch::VirtualBatch(Model model, Loss loss, Options options)
    : state_(std::make_unique<State>(std::move(model), std::move(loss), std::move(options))) {}
VirtualBatch::~VirtualBatch() = default;
VirtualBatch::VirtualBatch(VirtualBatch&&) noexcept = default;
VirtualBatch& VirtualBatch::operator=(VirtualBatch&&) noexcept = default;

StepReport VirtualBatch::backward(const Batch& inputs, const Batch& targets) {
  const BatchSource rows = BatchSource::from(inputs, "inputs");
  return backward(rows, targets_source(targets, rows.size));
}

StepReport VirtualBatch::backward(const BatchSource& inputs, const BatchSource& targets) {
  return state_->step(inputs, targets, /*hand_out=*/true);
}

Plan VirtualBatch::plan(const Batch& inputs, const Batch& targets) {
  const BatchSource rows = BatchSource::from(inputs, "inputs");
  return plan(rows, targets_source(targets, rows.size));
}

Plan VirtualBatch::plan(const BatchSource& inputs, const BatchSource& targets) {
  state_->step(inputs, targets, /*hand_out=*/false);
  return state_->plan();
}

}  // namespace infinitybatch
