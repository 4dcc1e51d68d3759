#include <infinitybatch/train/gradient_step.hpp>
#include <infinitybatch/train/optimizer.hpp>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <utility>

namespace infinitybatch {
namespace {

class TorchOptimizer final : public Optimizer {
 public:
  TorchOptimizer(torch::optim::Optimizer& optimizer, std::optional<double> clip_norm)
      : optimizer_(optimizer), clip_norm_(clip_norm) {}

  void zero_grad() override { optimizer_.zero_grad(); }
  void step() override {
    if (clip_norm_) {
      std::vector<at::Tensor> parameters;
      for (const auto& group : optimizer_.param_groups()) {
        parameters.insert(parameters.end(), group.params().begin(), group.params().end());
      }
      torch::nn::utils::clip_grad_norm_(parameters, *clip_norm_);
    }
    optimizer_.step();
  }
  std::vector<double> learning_rates() const override {
    std::vector<double> rates;
    for (const auto& group : optimizer_.param_groups()) rates.push_back(group.options().get_lr());
    return rates;
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::optional<double> clip_norm_;
};

class FunctionSchedule final : public Schedule {
 public:
  explicit FunctionSchedule(std::function<void(double)> step) : step_(std::move(step)) {}
  void step(double loss) override { step_(loss); }

 private:
  std::function<void(double)> step_;
};

class VirtualGradient final : public GradientStep {
 public:
  VirtualGradient(Model model, Loss loss, Options options)
      : batch_(std::move(model), std::move(loss), listening(std::move(options))) {}

  StepReport run(const LogicalBatch& batch, const OnMicroBatch& on_micro_batch) override {
    struct Reset {
      ~Reset() { pointer = nullptr; }
      const OnMicroBatch*& pointer;
    } reset{listener_};
    listener_ = &on_micro_batch;
    return batch_.backward(batch.inputs, batch.targets);
  }

 private:
  Options listening(Options options) {
    options.on_micro_batch =
        [this, own = std::move(options.on_micro_batch)](const infinitybatch::MicroBatch& rows) {
          if (own) own(rows);
          if (listener_ != nullptr) (*listener_)(rows);
        };
    return options;
  }

  const OnMicroBatch* listener_ = nullptr;
  VirtualBatch batch_;
};

}  // namespace

std::unique_ptr<GradientStep> make_gradient_step(Model model, Loss loss, Options options) {
  return std::make_unique<VirtualGradient>(std::move(model), std::move(loss), std::move(options));
}

std::shared_ptr<Optimizer> optimizers::of(torch::optim::Optimizer& optimizer,
                                          std::optional<double> clip_norm) {
  return std::make_shared<TorchOptimizer>(optimizer, clip_norm);
}

std::shared_ptr<Schedule> schedules::of(torch::optim::LRScheduler& scheduler) {
  return schedules::of([&scheduler](double) { scheduler.step(); });
}

std::shared_ptr<Schedule> schedules::of(std::function<void(double loss)> step) {
  return std::make_shared<FunctionSchedule>(std::move(step));
}

}  // namespace infinitybatch
