#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

namespace infinitybatch {

/// What becomes of an output that is one number for each micro-batch.
enum class Reduce {
  none,  ///< refuse it: nobody knows what it means
  sum,   ///< it is a sum over samples
  mean,  ///< it is a mean over samples: weighted by the rows of each micro-batch
};

/// How a Wrap runs its model.
struct WrapOptions {
  /// Samples that are computed at once; the last micro-batch may be smaller.
  std::optional<int64_t> micro_batch_size;
  /// Not yet: Unsupported is thrown.
  std::optional<memory::Budget> memory_budget;
  BatchCoupling batch_coupling = BatchCoupling::exact;
  Reduce reduce = Reduce::none;
  /// The dimension of outputs along which samples lie, where more than one could be it. Without it
  /// outputs are joined along the only dimension whose size follows the micro-batch's.
  std::optional<int64_t> output_batch_dim;
  /// Called between micro-batches; may throw to abandon the call (Ctrl-C in bindings).
  std::function<void()> interrupt;
  /// Called with every exception that leaves the backward pass; may throw another instead
  /// (bindings: autograd knows nothing of this library's errors).
  std::function<void(const std::exception_ptr&)> on_backward_error;
};

/// A model whose forward is computed micro-batch by micro-batch and whose outputs carry one graph
/// node for the whole batch, so that a training loop stays as it is.
///
///     Wrap wrapped(net, {.micro_batch_size = 32});
///     at::Tensor loss = contrastive(wrapped.forward(images).tensor());   // any loss
///     loss.backward();                                                  // exact gradients in
///     .grad
///
/// Forward records each micro-batch's tape and drops its graph; backward replays the tapes, last to
/// first (or runs the model again where a tape is opaque), compares the outputs bit for bit with
/// those of forward, and returns the sums as the gradients of the one node: hooks, DDP and
/// `torch::autograd::grad` see one full gradient. Outputs that were changed in place since forward
/// are not compared. A batch of one micro-batch runs natively.
///
/// Gradients of parameters, of inputs and of other leaves that forward reads are exact;
/// `retain_graph` works; `create_graph` throws Unsupported; parameters, inputs and buffers that
/// forward read and that were changed in place since throw StateError.
class Wrap {
 public:
  /// \throws InvalidArgument for a micro_batch_size below 1, or without one
  /// \throws Unsupported     with a memory_budget
  Wrap(Model model, WrapOptions options);

  /// \param inputs leaves that require grad get their gradient; those on the host are brought to
  /// the
  ///               model's device, one micro-batch at a time
  /// \throws BatchError    inputs that cannot be split, outputs that cannot be joined
  /// \throws CouplingError a layer that mixes samples, or a buffer that depends on them
  /// \throws Unsupported   tensors that no gradient can pass exactly
  /// and whatever the model throws; buffers and random state are as before then.
  Batch forward(const Batch& inputs) const;

 private:
  std::shared_ptr<struct Wrapped> wrapped_;
};

}  // namespace infinitybatch
