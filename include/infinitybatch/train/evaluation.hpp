#pragma once

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/step/options.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <memory>

namespace infinitybatch {

/// A loss over any number of batches, forward only, in slices that fit the budget. While it lives
/// the model may draw random numbers and write buffers; both are put back when it ends. Training
/// mode is the caller's to change. No gradient is made.
///
///     net->eval();
///     Evaluation evaluation(net, losses::cross_entropy(), {.memory_budget = "64MiB"});
///     for (auto& [images, labels] : batches) evaluation.add(images, labels);
///     evaluation.loss();
class Evaluation {
 public:
  /// \param options its memory_budget, micro_batch_size, micro_batch_tokens, trim, batch_dim,
  ///                on_micro_batch and interrupt are read; the callback sees each slice once, for
  ///                metrics that keep no outputs
  /// \throws InvalidArgument for options out of range, or micro_batch_tokens without trim
  Evaluation(Model model, Loss loss, Options options = {});
  ~Evaluation();
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

  /// Slices are halved where they do not fit, for later batches too. A coupled loss sees the
  /// outputs of the whole batch, which are kept for as long.
  /// \throws BatchError inputs and targets of different size; with `trim`: rows that differ
  ///         without their padding, or a loss that takes something from padding
  /// \throws BudgetExceeded where one sample does not fit
  /// and whatever the model, the loss and the callback throw.
  void add(const BatchSource& inputs, const BatchSource& targets);
  void add(const Batch& inputs, const Batch& targets);

  /// Over all samples so far: one denominator for all of a separable loss, else the mean of the
  /// batches' losses weighted by their samples. NaN without samples.
  double loss() const;
  int64_t samples() const;
  /// The largest slice that is known to fit; what was given, before.
  int64_t micro_batch_size() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace infinitybatch
