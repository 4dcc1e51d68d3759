#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace torch::optim {
class Optimizer;
class LRScheduler;
}  // namespace torch::optim

namespace infinitybatch {

/// What a Trainer does with gradients.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual void zero_grad() = 0;
  /// From whole gradients; clipping and unscaling are its own.
  virtual void step() = 0;
  /// One for each parameter group.
  virtual std::vector<double> learning_rates() const = 0;
};

/// How learning rates change with the course of a training.
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// \param loss of the step or the mean of the epoch that has just ended
  virtual void step(double loss) = 0;
};

namespace optimizers {

/// One of torch::optim, which must outlive it.
/// \param clip_norm the most that the norm of all gradients together may be; nothing: any
std::shared_ptr<Optimizer> of(torch::optim::Optimizer& optimizer,
                              std::optional<double> clip_norm = std::nullopt);

}  // namespace optimizers

namespace schedules {

/// One of torch::optim (StepLR), which must outlive it.
std::shared_ptr<Schedule> of(torch::optim::LRScheduler& scheduler);
/// A function of the loss.
std::shared_ptr<Schedule> of(std::function<void(double loss)> step);

}  // namespace schedules
}  // namespace infinitybatch
