#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <algorithm>
#include <utility>

#include "interrupt.hpp"
#include "train/step.hpp"

namespace infinitybatch::app {
namespace {

class VirtualStep final : public Step {
 public:
  VirtualStep(std::shared_ptr<Network> network, const StepOptions& options)
      : batch_(make_model(network), losses::cross_entropy(), with_progress(options)) {}

  StepOutcome run(const BatchSource& inputs, const BatchSource& targets,
                  const OnSamples& on_samples) override {
    on_samples_ = &on_samples;
    const StepReport report = batch_.backward(inputs, targets);
    on_samples_ = nullptr;
    return {report.loss.item<double>(),
            *std::max_element(report.micro_batch_sizes.begin(), report.micro_batch_sizes.end()),
            report.restarts, report.offloaded_bytes};
  }

 private:
  Options with_progress(const StepOptions& options) {
    Options result = library_options(options);
    result.on_micro_batch = [this](const MicroBatch& part) {
      if (on_samples_ != nullptr) {
        (*on_samples_)(part.end);
      }
    };
    return result;
  }

  const OnSamples* on_samples_ = nullptr;
  VirtualBatch batch_;
};

}  // namespace

Options library_options(const StepOptions& options) {
  Options result;
  if (options.memory_budget) {
    result.memory_budget = memory::Budget(*options.memory_budget);
  }
  result.micro_batch_size = options.micro_batch_size;
  result.offload = options.offload;
  result.interrupt = check_interrupt;
  return result;
}

std::unique_ptr<Step> make_virtual_step(std::shared_ptr<Network> network,
                                        const StepOptions& options) {
  return std::make_unique<VirtualStep>(std::move(network), options);
}

}  // namespace infinitybatch::app
