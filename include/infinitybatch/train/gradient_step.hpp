#pragma once

#include <infinitybatch/core/micro_batch.hpp>
#include <infinitybatch/step/virtual_batch.hpp>
#include <infinitybatch/train/loader.hpp>

#include <functional>
#include <memory>

namespace infinitybatch {

/// Adds the gradient over one logical batch to `.grad` of a model's parameters.
class GradientStep {
 public:
  using OnMicroBatch = std::function<void(const MicroBatch&)>;

  virtual ~GradientStep() = default;
  /// The report's loss and micro-batch sizes, which add up to the samples, are read.
  virtual StepReport run(const LogicalBatch& batch, const OnMicroBatch& on_micro_batch) = 0;
};

/// A VirtualBatch. `options.on_micro_batch` is called too.
/// \throws InvalidArgument as VirtualBatch
std::unique_ptr<GradientStep> make_gradient_step(Model model, Loss loss, Options options = {});

}  // namespace infinitybatch
