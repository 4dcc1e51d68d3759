#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/execute/job.hpp>
#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/memory/budget.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace infinitybatch {

/// What to do where a layer mixes the samples of a batch (BatchNorm in training).
enum class BatchCoupling {
  exact,            ///< the gradient of the whole batch, or a typed error
  per_micro_batch,  ///< let each micro-batch be a batch of its own, as gradient accumulation does
};

/// What a step minimises: a sum over samples, streamed in one pass, or anything else, which sees
/// the outputs of the whole batch and takes two.
using Loss = std::variant<SeparableLoss, CoupledLoss>;

/// Where what waits at the cuts of tapes goes: an arena on the host, and beyond it an anonymous
/// file on disk, which is gone with the process however that ends.
struct Offload {
  enum class When : uint8_t {
    automatic,  ///< where no plan fits otherwise
    always,     ///< wherever tapes are cut, or outputs wait for a coupled loss; graphs if that pays
    never,      ///< one sample that does not fit computes it again instead, which takes time that
                ///< grows with the square of its depth; of a whole batch: BudgetExceeded
  };
  When when = When::automatic;
  /// What the arena may take of the host's memory. Nothing: half of what is available, and on the
  /// CPU, where the host is the device, none.
  std::optional<memory::Budget> host_budget = {};
  bool disk = true;
  std::string directory = {};  ///< of the file; empty: $TMPDIR, else /var/tmp
  /// On the CPU, to find out what a link to a device would cost: the arena's copies take at least
  /// their bytes divided by this, in bytes per second. 0: as fast as they go.
  double host_bandwidth = 0;
};

/// How to run a step. Without a budget and without a size the budget is "auto". All members are
/// initialised, so that leaving one out is no warning.
struct Options {
  /// Bytes that tensors may occupy on the device during `backward`; see `memory::Budget`.
  std::optional<memory::Budget> memory_budget = {};
  /// Fixes the micro-batch size and skips planning; the last micro-batch may be smaller. A budget
  /// given beside it is kept, or BudgetExceeded is thrown.
  std::optional<int64_t> micro_batch_size = {};
  /// With a fixed `micro_batch_size` and a coupled loss or BatchNorm: micro-batches that keep their
  /// graph from the first pass, so that they need no second forward. Otherwise the plan decides.
  int64_t retained_micro_batches = 0;
  /// With a coupled loss: forwards are recorded, and the second pass replays them. False: it runs
  /// the model again, which gives the same gradient.
  bool use_tapes = true;
  /// Your word that what forward does depends on shapes only, as in DDP: it is recorded once for
  /// each number of rows, checked on a second micro-batch, and then its tape is used again, in
  /// later steps too. User code, hooks on modules and Python's random numbers run no more.
  bool static_graph = false;
  /// With `micro_batch_size`, for any loss: the graph of a micro-batch is never there as a whole.
  /// Its tape, or each stretch of it between ops that see the whole batch, is cut into about as
  /// many segments (at least 2), which are played again one after the other, last first. A plan
  /// for a `memory_budget` does so by itself where one sample does not fit.
  std::optional<int64_t> checkpoint_segments = {};
  /// Whether dropout, rand, randn and their like give the numbers that the whole batch's run would
  /// draw from the same generator, which is left where that run leaves it. Tapes are cut in front
  /// of each op that draws. Otherwise each micro-batch draws as a batch of its own.
  bool match_native_rng = false;
  BatchCoupling batch_coupling = BatchCoupling::exact;
  /// Where what waits at the cuts of tapes goes when the device is full.
  Offload offload = {};
  /// Keep the outputs of all micro-batches and return them, detached, in the report.
  bool keep_outputs = false;
  /// Called after each micro-batch's loss, for metrics that need outputs.
  std::function<void(const MicroBatch&)> on_micro_batch = {};
  /// Multiplies the gradients, not the reported loss: a gradient scaler's scale. A 0-dimensional
  /// tensor on the model's device, asked once per step.
  std::function<at::Tensor()> loss_scale = {};
  /// Called between micro-batches; may throw to abandon the step (Ctrl-C in bindings).
  std::function<void()> interrupt = {};
};

/// What one step did.
struct StepReport {
  at::Tensor loss;                       ///< detached, 0-dimensional, on the model's device
  std::optional<Batch> outputs;          ///< with `keep_outputs`
  int64_t peak_bytes = 0;                ///< the most that tensors occupied on the device
  std::optional<int64_t> memory_budget;  ///< in bytes, where one was given
  /// Once the plan knows it; not in a step in which a rehearsal took more than the plan will.
  std::optional<int64_t> predicted_peak_bytes;
  std::vector<int64_t> micro_batch_sizes;  ///< in the order they ran
  double seconds = 0;
  int64_t offloaded_bytes = 0;  ///< that left the device for host or disk, each time counted
  CopySeconds offload_seconds;  ///< of their copies, out and back
  int64_t restarts = 0;         ///< begun again with a smaller plan after running out of memory
  /// "stream", "replay" (a coupled loss, each forward of the user's ran once), "rerun" (some
  /// forwards ran twice; `strategy_reason` says why), "cut" (ops of the model see the whole batch),
  /// or "checkpoint" (the graph of one micro-batch was never there as a whole).
  std::string strategy;
  std::string strategy_reason;
};

/// A training step over a logical batch of any size.
///
///     VirtualBatch batch(model, losses::cross_entropy(), {.memory_budget = "512MiB"});
///     StepReport report = batch.backward(images, labels);   // exact gradients now in .grad()
///
/// Not for use by two threads at once; two objects with different models may run in two threads.
class VirtualBatch {
 public:
  /// \throws InvalidArgument for a micro_batch_size below 1 or retained_micro_batches below 0
  VirtualBatch(Model model, Loss loss, Options options = {});
  ~VirtualBatch();
  VirtualBatch(VirtualBatch&&) noexcept;
  VirtualBatch& operator=(VirtualBatch&&) noexcept;

  /// Adds the gradient of the loss over the whole logical batch to `.grad` of every parameter.
  /// On any failure parameters, `.grad`, buffers and random state are as they were.
  /// \throws Unsupported       with `static_graph` where two recordings differ; names the op
  /// \throws BatchError        inputs and targets that cannot be split alike
  /// \throws CouplingError     a layer that mixes samples, or a buffer that depends on them
  /// \throws BudgetExceeded    no plan stays inside the budget
  /// \throws StateError        under no_grad; while another step runs on the same parameters
  /// \throws Unsupported       tensor subclasses, inference tensors
  /// and whatever the model, the loss or a hook throws.
  StepReport backward(const Batch& inputs, const Batch& targets);
  StepReport backward(const BatchSource& inputs, const BatchSource& targets);

  /// The plan that `backward` would follow for such a batch. Runs probes where none is known yet;
  /// leaves gradients, buffers and random state as they were.
  Plan plan(const Batch& inputs, const Batch& targets);
  Plan plan(const BatchSource& inputs, const BatchSource& targets);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace infinitybatch
