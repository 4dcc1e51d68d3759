#include "train/training.hpp"

#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "errors.hpp"
#include "interrupt.hpp"
#include "output/numbers.hpp"

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

class Training {
 public:
  Training(std::shared_ptr<Network> network, const Dataset& data, const TrainingOptions& options,
           TrainingObserver& observer)
      : network_(std::move(network)),
        data_(data),
        options_(options),
        observer_(observer),
        batch_size_(batch_size_for(options.step, data)),
        optimizer_(make_optimizer(options.optimizer, network_->parameters())),
        step_(options.step.strategy == "native" ? make_native_step(network_, options.device)
                                                : make_virtual_step(network_, options.step)) {}

  void epoch(int64_t number) {
    memory::PeakScope peak(options_.device);
    EpochResult result;
    result.epoch = number;
    const auto begin = Clock::now();
    run_steps(result, begin);
    result.seconds = seconds_since(begin);
    result.samples_per_second = static_cast<double>(data_.train.size) / result.seconds;
    if (data_.held_out.size > 0) {
      // What fits with gradients fits without; plain PyTorch has no such size to offer.
      const bool is_native = options_.step.strategy == "native";
      int64_t slice = is_native ? kNativeEvaluationSlice : result.micro_batch_size;
      result.held_out = evaluate(*network_, data_.held_out, options_.device, slice);
    }
    result.peak_bytes = peak.peak();
    observer_.on_epoch(result);
    const double most = kDiverged * std::max(*first_loss_, 1.0);
    if (number == options_.epochs && result.loss > most) {
      throw diverged(result.loss, "the last epoch");
    }
  }

 private:
  void run_steps(EpochResult& result, Clock::time_point begin) {
    const int64_t total = data_.train.size;
    const int64_t steps = (total + batch_size_ - 1) / batch_size_;
    const at::Tensor order = shuffled(total, options_.seed, result.epoch);
    Progress progress{result.epoch, 0, total, std::numeric_limits<double>::quiet_NaN(), 0};
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t first = step * batch_size_;
      const at::Tensor indices = order.slice(0, first, std::min(first + batch_size_, total));
      const auto on_samples = [&](int64_t done) {
        progress.done = first + done;
        progress.seconds = seconds_since(begin);
        observer_.on_progress(progress);
      };
      StepOutcome outcome;
      try {
        check_interrupt();
        optimizer_->zero_grad();
        outcome = step_->run(source_of(data_.train.inputs, indices),
                             source_of(data_.train.targets, indices), on_samples);
      } catch (const Interrupted& interrupted) {
        throw Interrupted(interrupted.code(),
                          std::string(interrupted.what_without_backtrace()) + " in epoch " +
                              std::to_string(result.epoch) + " after " + std::to_string(step) +
                              " of its " + std::to_string(steps) +
                              " steps; the step at work was given up as a whole");
      }
      check_loss(outcome.loss,
                 "step " + std::to_string(step + 1) + " of epoch " + std::to_string(result.epoch));
      optimizer_->step();
      progress.loss = outcome.loss;
      result.loss +=
          outcome.loss * static_cast<double>(indices.size(0)) / static_cast<double>(total);
      result.micro_batch_size = std::max(result.micro_batch_size, outcome.micro_batch_size);
      result.restarts += outcome.restarts;
      result.offloaded_bytes += outcome.offloaded_bytes;
      ++result.steps;
    }
  }

  /// A gradient of what is not finite leaves no parameter that is.
  void check_loss(double loss, const std::string& where) {
    if (!first_loss_) first_loss_ = loss;
    if (!std::isfinite(loss)) throw diverged(loss, where);
  }

  Diverged diverged(double loss, const std::string& where) const {
    const double lr = options_.optimizer.lr.value_or(default_lr(options_.optimizer.name));
    return Diverged(
        "training diverged: the loss is " + (std::isnan(loss) ? "nan" : shortest(loss)) + " in " +
        where + ", it was " + shortest(*first_loss_) +
        " in the first step; use a smaller learning rate, as in: --lr " + shortest(lr / 10));
  }

  std::shared_ptr<Network> network_;
  const Dataset& data_;
  const TrainingOptions& options_;
  TrainingObserver& observer_;
  int64_t batch_size_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<Step> step_;
  std::optional<double> first_loss_;
};

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
           TrainingObserver& observer) {
  std::optional<memory::Limit> limit;
  if (options.step.memory_budget && options.device.is_cpu()) {
    limit.emplace(*options.step.memory_budget);
  }
  Training training(std::move(network), data, options, observer);
  for (int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    training.epoch(epoch);
  }
}

}  // namespace infinitybatch::app
