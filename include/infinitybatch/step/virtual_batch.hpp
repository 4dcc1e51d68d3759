#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/step/options.hpp>

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace infinitybatch {

/// What a step minimises: a sum over samples, streamed in one pass, or anything else, which sees
/// the outputs of the whole batch and takes two.
using Loss = std::variant<SeparableLoss, CoupledLoss>;

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
  /// Of "cut": which boundary activations were kept where others were computed again, and why they
  /// were that and not offloaded, or the other way round; empty where all fit.
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
  /// \throws InvalidArgument for options out of range, or that contradict each other
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
