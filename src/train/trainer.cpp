#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/train/trainer.hpp>

#include <ATen/core/TensorBody.h>

#include <chrono>
#include <numeric>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

using TrainerClock = std::chrono::steady_clock;

/// Adds the time of a stretch to an epoch's seconds, however it ends.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), begin_(TrainerClock::now()) {}
  ~Stopwatch() { seconds_ += elapsed(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double elapsed() const {
    return std::chrono::duration<double>(TrainerClock::now() - begin_).count();
  }

  double& seconds_;
  TrainerClock::time_point begin_;
};

int64_t samples_of(const StepReport& report) {
  return std::accumulate(report.micro_batch_sizes.begin(), report.micro_batch_sizes.end(),
                         int64_t{0});
}

}  // namespace

Trainer::Trainer(std::shared_ptr<GradientStep> gradient, std::shared_ptr<Optimizer> optimizer,
                 std::shared_ptr<Loader> loader, TrainerOptions options)
    : gradient_(std::move(gradient)),
      optimizer_(std::move(optimizer)),
      loader_(std::move(loader)),
      options_(std::move(options)) {
  if (!gradient_ || !optimizer_ || !loader_) {
    throw InvalidArgument(
        "a Trainer needs a gradient step, an optimizer and a loader; one is null");
  }
  if (options_.batches_per_epoch && *options_.batches_per_epoch < 1) {
    throw InvalidArgument("batches_per_epoch is " + std::to_string(*options_.batches_per_epoch) +
                          "; an epoch has at least 1 batch");
  }
  if (!options_.callbacks) options_.callbacks = std::make_shared<Callback>();
}

void Trainer::run(int64_t epochs) {
  if (epochs < 0) {
    throw InvalidArgument("epochs is " + std::to_string(epochs) + "; it is 0 or more");
  }
  if (running_) {
    throw StateError(
        "this trainer runs already, around this call; end that run with trainer.stop() first");
  }
  running_ = true;
  try {
    tell_owed();
    const int64_t last = state_.epoch + epochs;
    options_.callbacks->on_run_begin({*this, state_.epoch, state_.step, epochs});
    while (state_.epoch < last && !stop_) run_epoch();
    options_.callbacks->on_run_end({*this, state_.epoch, state_.step, stop_});
    running_ = stop_ = false;
  } catch (...) {
    fail(std::current_exception());
    running_ = stop_ = false;
    throw;
  }
}

void Trainer::restore(const TrainerState& state) {
  if (running_) {
    throw StateError("a trainer's state cannot be replaced while it runs; call trainer.stop()");
  }
  state_ = state;
  pending_.reset();
  owed_.reset();
  ending_.reset();
  loader_begun_ = false;
}

void Trainer::step(double loss) {
  if (running_) {
    throw StateError("trainer.step() is for loops of your own, and this trainer runs its own loop");
  }
  commit([&] {
    optimizer_->step();
    ++state_.step;
    step_schedule(ScheduleBy::step, loss);
  });
}

events::EvaluationEnd Trainer::evaluate(
    Evaluation& evaluation, Loader& loader,
    const std::function<std::map<std::string, double>()>& metrics) {
  const auto begin = TrainerClock::now();
  options_.callbacks->on_evaluation_begin({*this, state_.epoch, state_.step});
  loader.begin(/*epoch=*/0, /*skip=*/0);
  while (const auto batch = loader.next()) evaluation.add(batch->inputs, batch->targets);
  if (evaluation.samples() == 0) throw StateError("the loader gave no batch to evaluate");
  events::EvaluationEnd end{*this,
                            state_.epoch,
                            state_.step,
                            evaluation.loss(),
                            evaluation.samples(),
                            metrics ? metrics() : std::map<std::string, double>(),
                            std::chrono::duration<double>(TrainerClock::now() - begin).count()};
  options_.callbacks->on_evaluation_end(end);
  return end;
}

void Trainer::saved(const std::string& path) {
  options_.callbacks->on_checkpoint_saved({*this, state_.epoch, state_.step, path});
}

void Trainer::step_schedule(ScheduleBy what, double loss) {
  if (options_.schedule && options_.schedule_by == what) options_.schedule->step(loss);
}

void Trainer::run_epoch() {
  if (!state_.in_epoch) {
    state_.in_epoch = true;
    state_.batch = 0;
    state_.loss_sum = 0;
    state_.samples = 0;
    state_.seconds = 0;
    loader_begun_ = false;
    options_.callbacks->on_epoch_begin({*this, state_.epoch, state_.step});
  }
  {
    const Stopwatch watch(state_.seconds);
    while (!stop_ && draw()) {
      run_step(*pending_);
      tell_owed();
    }
  }
  // A stop after the last batch ends the epoch too, where the loader can tell that it was.
  if (!stop_ || !draw()) end_epoch();
}

bool Trainer::draw() {
  if (pending_) return true;
  if (options_.batches_per_epoch && state_.batch >= *options_.batches_per_epoch) return false;
  try {
    if (!loader_begun_) loader_->begin(state_.epoch, state_.batch);
    loader_begun_ = true;
    pending_ = loader_->next();
  } catch (...) {
    // Nobody knows where an iterator is that has thrown: it is begun anew.
    loader_begun_ = false;
    throw;
  }
  if (!pending_ && state_.batch == 0) {
    loader_begun_ = false;
    throw StateError("the loader gave no batch in epoch " + std::to_string(state_.epoch) +
                     "; give one that can be gone through once an epoch");
  }
  return pending_.has_value();
}

void Trainer::run_step(const LogicalBatch& batch) {
  options_.callbacks->on_batch_begin({*this, state_.epoch, state_.step, state_.batch, batch});
  if (options_.interrupt) options_.interrupt();
  optimizer_->zero_grad();
  auto report = std::make_shared<StepReport>(
      gradient_->run(batch, [this](const infinitybatch::MicroBatch& rows) {
        options_.callbacks->on_micro_batch({*this, state_.epoch, state_.step, rows});
      }));
  auto done = std::make_unique<events::BatchEnd>(
      events::BatchEnd{*this, state_.epoch, state_.step, state_.batch, report->loss.item<double>(),
                       samples_of(*report), report, optimizer_->learning_rates()});
  commit([&] {
    const double loss = done->loss;
    optimizer_->step();
    // All is counted before the schedule's step: one that throws follows a whole step.
    ++state_.step;
    state_.loss_sum += loss * static_cast<double>(done->samples);
    state_.samples += done->samples;
    ++state_.batch;
    owed_ = std::move(done);
    pending_.reset();
    step_schedule(ScheduleBy::step, loss);
  });
}

void Trainer::end_epoch() {
  commit([&] {
    const double loss = state_.loss_sum / static_cast<double>(state_.samples);
    ending_ = std::make_unique<events::EpochEnd>(
        events::EpochEnd{*this, state_.epoch, state_.step, loss, state_.samples, state_.batch,
                         state_.seconds, optimizer_->learning_rates()});
    ++state_.epoch;
    state_.batch = 0;
    state_.in_epoch = false;
    loader_begun_ = false;
    step_schedule(ScheduleBy::epoch, loss);
    ending_->learning_rates = optimizer_->learning_rates();
  });
  tell_owed();
}

void Trainer::tell_owed() {
  // Taken first: whoever throws has heard it.
  if (const auto done = std::move(owed_)) options_.callbacks->on_batch_end(*done);
  if (const auto done = std::move(ending_)) options_.callbacks->on_epoch_end(*done);
}

void Trainer::fail(const std::exception_ptr& error) {
  try {
    tell_owed();
    options_.callbacks->on_failure({*this, state_.epoch, state_.step, error});
  } catch (...) {  // NOLINT(bugprone-empty-catch): the first error is the one to tell
  }
}

void Trainer::commit(const std::function<void()>& work) {
  if (options_.commit) {
    options_.commit(work);
  } else {
    work();
  }
}

}  // namespace infinitybatch
