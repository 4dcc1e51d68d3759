#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "errors.hpp"
#include "train/step.hpp"

namespace infinitybatch::app {
namespace {

class NativeStep final : public Step {
 public:
  NativeStep(std::shared_ptr<Network> network, at::Device device)
      : network_(std::move(network)), device_(device) {}

  StepOutcome run(const BatchSource& inputs, const BatchSource& targets,
                  const OnSamples& on_samples) override {
    try {
      const at::Tensor images = inputs.rows(0, inputs.size).tensor().to(device_);
      const at::Tensor labels = targets.rows(0, targets.size).tensor().to(device_);
      const at::Tensor loss = at::cross_entropy_loss(network_->forward(images), labels);
      loss.backward();
      on_samples(inputs.size);
      return {loss.item<double>(), inputs.size};
    } catch (const c10::OutOfMemoryError& error) {
      throw NativeOutOfMemory(
          "--strategy native is out of memory with " + std::to_string(inputs.size) +
          " samples at once: " + cause_of(error) +
          "; leave --strategy out and the same batch trains inside the same budget");
    }
  }

 private:
  std::shared_ptr<Network> network_;
  at::Device device_;
};

}  // namespace

std::unique_ptr<Step> make_native_step(std::shared_ptr<Network> network, at::Device device) {
  return std::make_unique<NativeStep>(std::move(network), device);
}

}  // namespace infinitybatch::app
