#include "errors.hpp"
#include "interrupt.hpp"
#include "train/amp.hpp"
#include "train/step.hpp"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace infinitybatch::app {
namespace {

class NativeStep final : public GradientStep {
 public:
  NativeStep(std::shared_ptr<Network> network, at::Device device, bool amp)
      : network_(std::move(network)), device_(device), amp_(amp) {}

  StepReport run(const LogicalBatch& batch, const OnMicroBatch& on_micro_batch) override {
    const int64_t size = batch.inputs.size;
    try {
      const at::Tensor images = batch.inputs.rows(0, size).tensor().to(device_);
      const at::Tensor labels = batch.targets.rows(0, size).tensor().to(device_);
      const at::Tensor scores = scores_of(*network_, images, amp_);
      const at::Tensor loss = at::cross_entropy_loss(scores, labels);
      loss.backward();
      on_micro_batch({0, size, scores.detach(), labels});
      StepReport report;
      report.loss = loss.detach();
      report.micro_batch_sizes = {size};
      report.strategy = "native";
      return report;
    } catch (const c10::OutOfMemoryError& error) {
      throw NativeOutOfMemory("--strategy native is out of memory with " + std::to_string(size) +
                              " samples at once: " + cause_of(error) +
                              "; leave --strategy out and the same batch trains inside the same "
                              "budget");
    }
  }

 private:
  std::shared_ptr<Network> network_;
  at::Device device_;
  bool amp_;
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

std::unique_ptr<GradientStep> make_native_step(std::shared_ptr<Network> network, at::Device device,
                                               bool amp) {
  return std::make_unique<NativeStep>(std::move(network), device, amp);
}

}  // namespace infinitybatch::app
