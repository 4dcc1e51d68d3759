#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/step/left_place.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

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
  none,  ///< refuse it: nobody knows what it means
  sum,   ///< it is a sum over samples
  mean,  ///< it is a mean over samples: weighted by the rows of each micro-batch
};

/// How a Wrap runs its model. Without a budget and without a size the budget is "auto".
struct WrapOptions {
  /// Samples that are computed at once; the last micro-batch may be smaller. Given alone it is all
  /// that is kept to.
  std::optional<int64_t> micro_batch_size = {};
  /// With a given size: how many micro-batches, the last ones, keep their graph from forward to
  /// backward and need no second forward. Where ops of the model see the whole batch none does.
  int64_t retained_micro_batches = 0;
  /// Bytes that tensors may occupy on the device during forward and during backward; see
  /// `memory::Budget`. What is allocated in between, by the loss above all, counts as what is
  /// there. A size given beside it is kept to, or BudgetExceeded is thrown.
  std::optional<memory::Budget> memory_budget = {};
  BatchCoupling batch_coupling = BatchCoupling::exact;
  /// Whether ops that draw random numbers (dropout, rand, randn, …) give the numbers that the whole
  /// batch's own forward draws, whatever the sizes of micro-batches, and leave generators where it
  /// leaves them; see `Options::match_native_rng`, also for what is a CouplingError. Such ops see
  /// the whole batch: models that draw go from one to the next.
  bool match_native_rng = false;
  /// Your word that what forward does depends on shapes only: see `Options::static_graph`. User
  /// code, hooks on modules and Python's random numbers run no more once a second micro-batch has
  /// been the same program. Recordings in front of a backward, and without one, are others.
  bool static_graph = false;
  /// Where what waits goes when the device is full: with ops that see the whole batch what waits
  /// for them, and for backward; else the graphs of `retained_micro_batches`. `never` makes
  /// BudgetExceeded of it; without a budget only `always` does anything. Under a budget without a
  /// size `always` keeps the graphs of all micro-batches away from the device, in place of second
  /// forwards, as long as there is room for them. All calls of one Wrap share one store, one thread
  /// at a time.
  Offload offload = {};
  Reduce reduce = Reduce::none;
  /// The dimension of outputs along which samples lie, where more than one could be it. Without it
  /// outputs are joined along the only dimension whose size follows the micro-batch's.
  std::optional<int64_t> output_batch_dim = {};
  /// Called between micro-batches; may throw to abandon the call (Ctrl-C in bindings).
  std::function<void()> interrupt = {};
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
/// With a memory budget the micro-batch size is the fastest that fits, and as many micro-batches as
/// fit keep their graph. The first forward with a new kind of batch tries sizes, undoes it, and
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
  /// \throws InvalidArgument for a micro_batch_size below 1, retained_micro_batches below 0, and
  ///               for options that contradict each other
  Wrap(Model model, WrapOptions options);

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
