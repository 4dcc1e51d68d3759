#pragma once

#include "exactness/exactness.hpp"

#include <infinitybatch/step/wrap.hpp>

// Strategies in which a loss sees the outputs of the whole batch and the model runs in two passes.
namespace infinitybatch::testing {

/// `loss` over the whole batch at once, as a user who declares nothing would write it.
inline at::Tensor at_once(const SeparableLoss& loss, const Batch& outputs, const Batch& targets,
                          int64_t samples) {
  const at::Tensor sum = loss.sum(outputs, targets);
  const DenominatorPart part = loss.denominator(targets, samples);
  at::Tensor value = sum;
  if (const auto* number = std::get_if<double>(&part)) value = sum / *number;
  if (const auto* tensor = std::get_if<at::Tensor>(&part)) value = sum / *tensor;
  return loss.has_penalty() ? value + loss.penalty() : value;
}

/// How many micro-batches keep their graph: 0, half of them, all.
enum class Retained { none, some, all };

template <Retained kRetained>
struct Replay {
  static constexpr bool two_passes = true;

  static std::string name() {
    return kRetained == Retained::none   ? "replay"
           : kRetained == Retained::some ? "replay_half_retained"
                                         : "replay_all_retained";
  }

  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    const auto value = [=](const Batch& outputs, const Batch& all_targets) {
      return at_once(loss, outputs, all_targets, samples);
    };
    return run(model, losses::coupled(value), inputs, targets, samples, micro_batch_size);
  }

  static StepReport run(const Model& model, const CoupledLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    Options options;
    options.micro_batch_size = micro_batch_size;
    const int64_t count = (samples + micro_batch_size - 1) / micro_batch_size;
    options.retained_micro_batches = kRetained == Retained::none   ? 0
                                     : kRetained == Retained::some ? (count + 1) / 2
                                                                   : count;
    VirtualBatch batch(model, loss, options);
    StepReport report = batch.backward(inputs, targets);
    if (report.strategy == "replay") report.strategy = name();
    return report;
  }
};

struct Wrapping {
  static constexpr bool two_passes = true;
  /// Forwards in front of the wrapped model's own.
  static constexpr std::ptrdiff_t looks = 1;

  static std::string name() { return "wrap"; }

  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    const auto value = [=](const Batch& outputs, const Batch& all_targets) {
      return at_once(loss, outputs, all_targets, samples);
    };
    return run(model, losses::coupled(value), inputs, targets, samples, micro_batch_size);
  }

  static StepReport run(const Model& model, const CoupledLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t /*samples*/, int64_t micro_batch_size) {
    const memory::PeakScope peak(at::kCPU);
    Options options;
    options.micro_batch_size = micro_batch_size;
    WrapOptions own;
    {
      // The user knows along which dimension samples lie; micro-batches of one row do not tell.
      const Batch whole = model.forward(inputs);
      if (!whole.leaves().empty()) own.output_batch_dim = whole.leaves()[0].batch_dim;
    }
    const Wrap wrapped(model, options, own);
    const Batch outputs = wrapped.forward(inputs);
    const at::Tensor value = loss.value(outputs, targets);
    value.backward();
    const WrapReport done = wrapped.last_report().value();
    StepReport report;
    report.loss = value.detach();
    report.micro_batch_sizes = done.micro_batch_sizes;
    report.strategy = done.strategy == "rerun" ? "rerun" : name();
    report.peak_bytes = peak.peak();
    return report;
  }
};

}  // namespace infinitybatch::testing
