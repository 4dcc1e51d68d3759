#pragma once

#include <infinitybatch/step/virtual_batch.hpp>
#include <infinitybatch/train/callback.hpp>
#include <infinitybatch/train/evaluation.hpp>
#include <infinitybatch/train/gradient_step.hpp>
#include <infinitybatch/train/loader.hpp>
#include <infinitybatch/train/optimizer.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch {

enum class ScheduleBy : uint8_t { epoch, step };

/// How a Trainer goes through its epochs.
struct TrainerOptions {
  std::shared_ptr<Callback> callbacks = {};
  std::shared_ptr<Schedule> schedule = {};
  ScheduleBy schedule_by = ScheduleBy::epoch;
  /// Ends an epoch after so many batches, for loaders without an end. Nothing: the loader's end.
  std::optional<int64_t> batches_per_epoch = {};
  /// Asked before each step; may throw to end the run (Ctrl-C).
  std::function<void()> interrupt = {};
  /// Runs what must not end half way: the optimizer's step and what counts it. Bindings hold
  /// signals back meanwhile.
  std::function<void(const std::function<void()>&)> commit = {};
};

/// Where a training is: all that the loop itself must know to go on.
struct TrainerState {
  int64_t epoch = 0;  ///< whole epochs done
  int64_t step = 0;   ///< steps done
  int64_t batch = 0;  ///< steps done in the epoch at work
  bool in_epoch = false;
  double loss_sum = 0;  ///< of the epoch at work, over its samples
  int64_t samples = 0;
  double seconds = 0;
};

/// The training loop: epochs of logical batches, each one exact gradient and one optimizer step.
///
///     torch::optim::Adam adam(net->parameters());
///     Trainer trainer(make_gradient_step(net, losses::cross_entropy(), {.memory_budget =
///     "512MiB"}),
///                     optimizers::of(adam), loaders::over(batches));
///     trainer.run(200);
///
/// The command line and Python's `infinitybatch.Trainer` run this loop. Whatever throws, at any
/// event, leaves a state from which `run` goes on with the same bits: a step is done, with its
/// optimizer and schedule, or has not begun, and its batch comes again. Not for two threads.
class Trainer {
 public:
  /// \throws InvalidArgument for a null part, or batches_per_epoch below 1
  Trainer(std::shared_ptr<GradientStep> gradient, std::shared_ptr<Optimizer> optimizer,
          std::shared_ptr<Loader> loader, TrainerOptions options = {});

  /// Trains until `epochs` more epochs are done, the one at work counted as one of them.
  /// \throws InvalidArgument epochs below 0
  /// \throws StateError      from within a run; a loader that gives no batch
  /// and whatever the parts and callbacks throw.
  void run(int64_t epochs);

  /// For loops of one's own: the optimizer's step from gradients that are there, and the schedule's
  /// where it goes by steps. No event is told.
  /// \param loss for a schedule that asks for it
  /// \throws StateError from within a run
  void step(double loss);

  /// All of a loader's batches through `evaluation`, told as EvaluationBegin and EvaluationEnd.
  /// \param metrics asked at the end for what callbacks of the evaluation have counted
  /// \throws StateError where the loader gives no batch
  events::EvaluationEnd evaluate(
      Evaluation& evaluation, Loader& loader,
      const std::function<std::map<std::string, double>()>& metrics = {});

  /// For whoever writes checkpoints: tells CheckpointSaved.
  void saved(const std::string& path);

  /// The run at work ends after its step; between runs, the next one before it trains.
  void stop() noexcept { stop_ = true; }

  bool running() const noexcept { return running_; }
  const TrainerState& state() const noexcept { return state_; }
  /// Goes on from there: the loader is begun anew where that is in the middle of an epoch.
  /// \throws StateError from within a run
  void restore(const TrainerState& state);

 private:
  void run_epoch();
  void run_step(const LogicalBatch& batch);
  bool draw();
  void end_epoch();
  void tell_owed();
  void fail(const std::exception_ptr& error);
  void step_schedule(ScheduleBy what, double loss);
  void commit(const std::function<void()>& work);

  std::shared_ptr<GradientStep> gradient_;
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<Loader> loader_;
  TrainerOptions options_;
  TrainerState state_;
  std::optional<LogicalBatch> pending_;       ///< drawn, and its step not done
  bool loader_begun_ = false;                 ///< and at `state_.batch`, a pending batch beyond it
  std::unique_ptr<events::BatchEnd> owed_;    ///< of a step that is done, not told yet
  std::unique_ptr<events::EpochEnd> ending_;  ///< likewise
  bool running_ = false;
  bool stop_ = false;
};

}  // namespace infinitybatch
