#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/step/left_place.hpp>
#include <infinitybatch/step/options.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What becomes of an output that is one number for each micro-batch.
enum class Reduce {
  none,  ///< refuse it, but for a cross entropy's own sum or mean: nobody knows what it means
  sum,   ///< it is a sum over samples
  mean,  ///< it is a mean over samples; of a cross entropy's over the targets that count
};

/// What only a Wrap has, beside `Options`.
struct WrapOptions {
  Reduce reduce = Reduce::none;
  /// The dimension of outputs along which samples lie, where more than one could be it. Without it
  /// outputs are joined along the only dimension whose size follows the micro-batch's.
  std::optional<int64_t> output_batch_dim = {};
  /// What lies where forward may leave tensors beside its outputs (bindings). What it leaves there
  /// for the micro-batches is joined, as it lies there after a forward over the whole batch.
  std::function<std::vector<LeftPlace>()> left_places = {};
  /// Called with every exception that leaves the backward pass; may throw another instead
  /// (bindings: autograd knows nothing of this library's errors).
  std::function<void(const std::exception_ptr&)> on_backward_error = {};
  /// Called at the end of every backward pass, before its gradients leave it, with null or with the
  /// exception that it failed with, which is thrown afterwards; may throw, and no gradient leaves.
  /// For several processes that must agree: each tells the others, and throws where one has failed.
  /// With it every batch that wants a gradient has a node, one of a single micro-batch too.
  std::function<void(const std::exception_ptr&)> agree = {};
  /// Beside `agree`: called in front of every forward with gradients, with whether its batch is one
  /// micro-batch; returns whether that is so for all processes. Where it is not, forward must run
  /// no collective.
  std::function<bool(bool)> begin = {};
};

/// What the last call of a Wrap did; its backward adds to it.
struct WrapReport {
  std::vector<int64_t> micro_batch_sizes;  ///< in the order they ran
  int64_t retained = 0;  ///< micro-batches that keep their graph and need no second forward
  /// "replay" (each forward of the user's ran once), "rerun" (backward runs some of them again,
  /// `strategy_reason` says why), "cut" (ops of the model see the whole batch: from cut to cut),
  /// "forward" (no gradient is wanted) or "native" (no budget, and one micro-batch). With `always`
  /// and a plan the reason says of "replay" why graphs are offloaded or not.
  std::string strategy;
  std::string strategy_reason;
  /// Attributes of modules (and what hooks hold) in which each micro-batch left another tensor that
  /// is none of the outputs and could not be joined: whoever reads one sees the last micro-batch's
  /// alone.
  std::vector<std::string> left_on_module;
  int64_t offloaded_bytes = 0;  ///< that left the device for host or disk, each time counted
  CopySeconds offload_seconds;  ///< of their copies, out and back
  GraphBytes graph_bytes;       ///< of the graphs that wait away from the device
  // With a memory budget:
  std::optional<int64_t> memory_budget;         ///< in bytes
  std::optional<int64_t> predicted_peak_bytes;  ///< once it is known what comes in between
  int64_t peak_bytes = 0;  ///< the most that tensors occupied since the call began
  int64_t restarts = 0;    ///< begun again after running out of memory
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
/// are not compared. With a fixed size alone a batch of one micro-batch runs natively.
///
/// Where ops of the model see the whole batch (BatchNorm in training mode, `across_batch`) forward
/// goes from one to the next with all micro-batches, as VirtualBatch does, and buffers get the
/// statistics of the whole batch once; what each such op was given waits until backward, which goes
/// the same way back, and may be offloaded meanwhile. A backward that fails half way uses this up,
/// unless the graph was to be kept.
///
/// With a memory budget the micro-batch size is the fastest that fits, and as many samples as fit
/// keep their graph. The first forward with a new kind of batch tries sizes, undoes it, and
/// leaves half of the room for the loss, of which nothing is known yet; the second one plans with
/// what the loss was seen to need. Several calls before backward share the budget: graphs of
/// earlier calls are dropped where a later one needs their memory. The limit is enforced on the
/// CPU, in the threads that call forward and run backward.
///
/// Gradients of parameters, of inputs and of other leaves that forward reads are exact;
/// `retain_graph` works; `create_graph` throws Unsupported; parameters, inputs and buffers that
/// forward read and that were changed in place since throw StateError.
class Wrap {
 public:
  /// \throws InvalidArgument for options out of range, that contradict each other, or that mean
  ///               nothing here: checkpoint_segments, keep_outputs and loss_scale
  Wrap(Model model, Options options, WrapOptions own = {});

  /// \param inputs leaves that require grad get their gradient; those on the host are brought to
  /// the
  ///               model's device, one micro-batch at a time
  /// \throws BatchError    inputs that cannot be split, outputs that cannot be joined
  /// \throws CouplingError a layer that mixes samples where forward cannot be cut, or a buffer that
  ///               depends on them
  /// \throws Unsupported   tensors that no gradient can pass exactly; with `static_graph` a forward
  ///               that is another program than before, or none that a tape can tell
  /// \throws BudgetExceeded  no micro-batch size stays inside the budget. Backward throws it where
  /// the
  ///               loss has left too little, or has itself passed the budget while no graph was
  ///               kept; `.grad` is as before then, and the next forward plans with that
  /// \throws StateError    another thread is at work in this object, with gradients
  /// \throws OffloadError  where host and disk have no room for what is offloaded
  /// and whatever the model throws; buffers and random state are as before then.
  Batch forward(const Batch& inputs) const;

  /// Of the last call; empty before the first one.
  std::optional<WrapReport> last_report() const;

 private:
  std::shared_ptr<struct Wrapped> wrapped_;
};

}  // namespace infinitybatch
