#include "train/training.hpp"

#include "errors.hpp"
#include "interrupt.hpp"
#include "output/numbers.hpp"
#include "train/amp.hpp"
#include "train/averages.hpp"
#include "train/metrics.hpp"
#include "train/schedule.hpp"

#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/train/trainer.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

namespace infinitybatch::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kNativeEvaluationSlice = 64;
/// Nothing that has learned anything ends so many times above where it began.
constexpr double kDiverged = 1000;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The order of an epoch's samples: a pure function of seed and epoch, whatever else draws numbers.
at::Tensor shuffled(int64_t size, uint64_t seed, int64_t epoch) {
  at::Generator generator =
      at::detail::createCPUGenerator(seed * 1'000'003 + static_cast<uint64_t>(epoch));
  return at::randperm(size, generator, at::kLong);
}

/// Ends a training whose loss says that it has diverged, before the optimizer spoils parameters.
class Watched final : public GradientStep {
 public:
  Watched(std::shared_ptr<GradientStep> step, const OptimizerOptions& optimizer)
      : step_(std::move(step)), optimizer_(optimizer) {}

  StepReport run(const LogicalBatch& batch, const OnMicroBatch& on_micro_batch) override {
    StepReport report = step_->run(batch, on_micro_batch);
    const double loss = report.loss.item<double>();
    if (!first_loss_) first_loss_ = loss;
    // A gradient of what is not finite leaves no parameter that is.
    if (!std::isfinite(loss)) throw diverged(loss, where);
    return report;
  }

  void check_last(double loss) const {
    if (loss > kDiverged * std::max(*first_loss_, 1.0)) throw diverged(loss, "the last epoch");
  }

  std::optional<double> first_loss() const { return first_loss_; }
  void set_first_loss(std::optional<double> loss) { first_loss_ = loss; }

  std::string where;  ///< the step at work, for people

 private:
  Diverged diverged(double loss, const std::string& place) const {
    const double lr = optimizer_.lr.value_or(default_lr(optimizer_.name));
    return Diverged(
        "training diverged: the loss is " + (std::isnan(loss) ? "nan" : shortest(loss)) + " in " +
        place + ", it was " + shortest(*first_loss_) +
        " in the first step; use a smaller learning rate, as in: --lr " + shortest(lr / 10));
  }

  std::shared_ptr<GradientStep> step_;
  const OptimizerOptions& optimizer_;
  std::optional<double> first_loss_;
};

/// Averages in place of the parameters, as long as it lives; none where there are none.
class Averaged {
 public:
  explicit Averaged(Averages* averages) : averages_(averages) {
    if (averages_ != nullptr) averages_->swap();
  }
  ~Averaged() {
    if (averages_ != nullptr) averages_->swap();
  }
  Averaged(const Averaged&) = delete;
  Averaged& operator=(const Averaged&) = delete;

 private:
  Averages* averages_;
};

/// Makes an observer's progress and epochs of the loop's events, and measures at their end.
class Telling final : public Callback {
 public:
  Telling(std::shared_ptr<Network> network, const Dataset& data, const TrainingOptions& options,
          std::shared_ptr<Watched> watched, std::shared_ptr<Averages> averages,
          TrainingObserver& observer)
      : network_(std::move(network)),
        averages_(std::move(averages)),
        data_(data),
        options_(options),
        watched_(std::move(watched)),
        observer_(observer),
        batch_size_(batch_size_for(options.step, data)) {}

  void on_run_begin(const events::RunBegin& event) override {
    // An epoch that another process began is not told again.
    const TrainerState& state = event.trainer.state();
    if (state.in_epoch) begin(state.epoch, state.samples);
  }
  void on_epoch_begin(const events::EpochBegin& event) override { begin(event.epoch, 0); }
  void on_batch_begin(const events::BatchBegin& event) override {
    first_ = event.batch * batch_size_;
    watched_->where =
        "step " + std::to_string(event.batch + 1) + " of epoch " + std::to_string(event.epoch + 1);
  }
  void on_micro_batch(const events::MicroBatch& event) override {
    progress_.done = first_ + event.rows.end;
    progress_.seconds = seconds_since(begin_);
    observer_.on_progress(progress_);
  }
  void on_batch_end(const events::BatchEnd& event) override {
    const auto& sizes = event.report->micro_batch_sizes;
    progress_.loss = event.loss;
    result_.micro_batch_size =
        std::max(result_.micro_batch_size, *std::max_element(sizes.begin(), sizes.end()));
    result_.restarts += event.report->restarts;
    result_.offloaded_bytes += event.report->offloaded_bytes;
    result_.strategy = event.report->strategy;
    result_.strategy_reason = event.report->strategy_reason;
    ++result_.steps;
  }
  void on_epoch_end(const events::EpochEnd& event) override {
    result_.loss = event.loss;
    result_.seconds = seconds_since(begin_);
    result_.samples_per_second = static_cast<double>(data_.train.size - before_) / result_.seconds;
    if (data_.held_out.size > 0) measure();
    result_.peak_bytes = peak_->peak();
    peak_.reset();
    observer_.on_epoch(result_);
    if (result_.epoch == options_.epochs) watched_->check_last(result_.loss);
  }

 private:
  void measure() {
    // What fits with gradients fits without; plain PyTorch has no such size to offer.
    const bool is_native = options_.step.strategy == "native";
    const int64_t slice = is_native ? kNativeEvaluationSlice : result_.micro_batch_size;
    const Averaged averaged(averages_.get());
    Metrics metrics(options_.metrics);
    const auto each = [&](const MicroBatch& rows) { metrics.add(rows); };
    result_.held_out = evaluate(network_, data_.held_out, slice, each, options_.amp);
    result_.metrics = metrics.values(result_.held_out->loss);
  }

  /// \param before samples of the epoch that were trained on by another process
  void begin(int64_t epoch, int64_t before) {
    peak_.emplace(options_.device);
    result_ = {};
    result_.epoch = epoch + 1;
    before_ = before;
    progress_ = {result_.epoch, before, data_.train.size, std::numeric_limits<double>::quiet_NaN(),
                 0};
    begin_ = Clock::now();
  }

  std::shared_ptr<Network> network_;
  std::shared_ptr<Averages> averages_;  ///< null without --ema
  const Dataset& data_;
  const TrainingOptions& options_;
  std::shared_ptr<Watched> watched_;
  TrainingObserver& observer_;
  int64_t batch_size_;
  std::optional<memory::PeakScope> peak_;
  EpochResult result_;
  Progress progress_;
  Clock::time_point begin_;
  int64_t first_ = 0;
  int64_t before_ = 0;
};

/// Keeps the state of a training after every so many epochs.
class Keeping final : public Callback {
 public:
  Keeping(const Checkpoints& checkpoints, torch::optim::Optimizer& optimizer,
          std::shared_ptr<Watched> watched, std::shared_ptr<Averages> averages)
      : checkpoints_(checkpoints),
        optimizer_(optimizer),
        watched_(std::move(watched)),
        averages_(std::move(averages)) {}

  void on_epoch_end(const events::EpochEnd& event) override {
    if (checkpoints_.save && checkpoints_.every > 0 &&
        (event.epoch + 1) % checkpoints_.every == 0) {
      save(event.trainer);
    }
  }
  void save(const Trainer& trainer) const {
    checkpoints_.save(optimizer_, {trainer.state(), watched_->first_loss(),
                                   averages_ ? averages_->tensors() : NamedTensors()});
  }

 private:
  const Checkpoints& checkpoints_;
  torch::optim::Optimizer& optimizer_;
  std::shared_ptr<Watched> watched_;
  std::shared_ptr<Averages> averages_;
};

/// What Ctrl-C left, and how to go on with it.
[[noreturn]] void tell_interrupted(const Interrupted& interrupted, const Trainer& trainer,
                                   int64_t steps, const Keeping& keeping,
                                   const Checkpoints& checkpoints) {
  const TrainerState& state = trainer.state();
  std::string message = interrupted.what_without_backtrace();
  if (state.in_epoch) {
    message += " in epoch " + std::to_string(state.epoch + 1) + " after " +
               std::to_string(state.batch) + " of its " + std::to_string(steps) +
               " steps; the interrupted step was discarded";
  } else if (state.epoch > 0) {
    message += " after epoch " + std::to_string(state.epoch);
  }
  if (checkpoints.save) {
    try {
      keeping.save(trainer);
      message += "; go on with: " + checkpoints.how_to_go_on;
    } catch (const SaveError& error) {
      message += "; nothing was saved: " + std::string(error.what_without_backtrace());
    }
  }
  throw Interrupted(interrupted.code(), message);
}

/// The training split in another order each epoch.
std::shared_ptr<Loader> shuffled_loader(const Split& split, int64_t batch_size, int64_t steps,
                                        uint64_t seed) {
  const auto order = std::make_shared<std::pair<int64_t, at::Tensor>>(-1, at::Tensor());
  return loaders::indexed(steps, [=, &split](int64_t epoch, int64_t batch) {
    if (order->first != epoch) *order = {epoch, shuffled(split.size, seed, epoch + 1)};
    const int64_t first = batch * batch_size;
    const at::Tensor indices =
        order->second.slice(0, first, std::min(first + batch_size, split.size));
    return LogicalBatch(source_of(split.inputs, indices), source_of(split.targets, indices));
  });
}

void set_epoch_lr(torch::optim::Optimizer& optimizer, const TrainingOptions& options,
                  int64_t epoch) {
  const double lr = options.optimizer.lr.value_or(default_lr(options.optimizer.name));
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(scheduled_lr(options.schedule, lr, epoch, options.epochs));
  }
}

std::shared_ptr<GradientStep> step_for(const std::shared_ptr<Network>& network,
                                       const TrainingOptions& options) {
  if (options.step.strategy == "native")
    return make_native_step(network, options.device, options.amp);
  return make_gradient_step(model_of(network, options.amp), losses::cross_entropy(),
                            library_options(options.step));
}

}  // namespace

BatchSource source_of(const Split::Rows& rows, const at::Tensor& indices) {
  BatchSource result;
  result.size = indices.size(0);
  result.rows = [&rows, indices](int64_t begin, int64_t end) {
    return Batch(rows(indices.slice(0, begin, end)));
  };
  return result;
}

int64_t batch_size_for(const StepOptions& options, const Dataset& data) {
  return std::min(options.batch_size.value_or(data.train.size), data.train.size);
}

void train(std::shared_ptr<Network> network, const Dataset& data, const TrainingOptions& options,
           TrainingObserver& observer, const Checkpoints& checkpoints) {
  std::optional<memory::Limit> limit;
  if (options.step.memory_budget && options.device.is_cpu()) {
    limit.emplace(*options.step.memory_budget);
  }
  const int64_t batch_size = batch_size_for(options.step, data);
  const int64_t steps = (data.train.size + batch_size - 1) / batch_size;
  const auto watched = std::make_shared<Watched>(step_for(network, options), options.optimizer);
  const auto optimizer = make_optimizer(options.optimizer, network->parameters());
  const auto averages = options.ema ? std::make_shared<Averages>(network, *options.ema) : nullptr;
  const auto keeping = std::make_shared<Keeping>(checkpoints, *optimizer, watched, averages);
  TrainerOptions loop;
  const std::shared_ptr<Callback> telling =
      std::make_shared<Telling>(network, data, options, watched, averages, observer);
  loop.callbacks = std::make_shared<Callbacks>(
      std::vector<std::shared_ptr<Callback>>{averages, telling, keeping});
  loop.interrupt = check_interrupt;
  const Trainer* running = nullptr;
  loop.schedule = schedules::of([&](double) {
    set_epoch_lr(*optimizer, options, running->state().epoch);  // of the epoch that comes
  });
  Trainer trainer(watched, optimizers::of(*optimizer, options.clip),
                  shuffled_loader(data.train, batch_size, steps, options.seed), loop);
  running = &trainer;
  if (checkpoints.restore) {
    const Snapshot snapshot = checkpoints.restore(*optimizer);
    watched->set_first_loss(snapshot.first_loss);
    if (averages) averages->restore(snapshot.averages);
    trainer.restore(snapshot.state);
  }
  set_epoch_lr(*optimizer, options, trainer.state().epoch);
  try {
    trainer.run(options.epochs - trainer.state().epoch);
  } catch (const Interrupted& interrupted) {
    tell_interrupted(interrupted, trainer, steps, *keeping, checkpoints);
  }
  if (averages) averages->swap();
}

}  // namespace infinitybatch::app
