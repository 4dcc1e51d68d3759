#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "store/safetensors.hpp"
#include "train/evaluate.hpp"
#include "train/optimizer.hpp"
#include "train/step.hpp"

#include <infinitybatch/train/trainer.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace infinitybatch::app {

struct TrainingOptions {
  StepOptions step;
  OptimizerOptions optimizer;
  std::string schedule = "constant";  ///< of the learning rate, see `scheduled_lr`
  std::optional<double> clip;         ///< the most that the norm of all gradients may be
  bool amp = false;                   ///< forward under autocast to bfloat16
  /// Decay of averages of the parameters; the network has them once it is trained.
  std::optional<double> ema;
  std::vector<std::string> metrics;  ///< of held-out samples, see `metric_names`
  int64_t epochs = 40;
  uint64_t seed = 0;
  c10::Device device = c10::kCPU;
};

/// Where a training is, beside its tensors.
struct Snapshot {
  TrainerState state;
  std::optional<double> first_loss;  ///< of the first step, to tell when training diverges
  NamedTensors averages;             ///< with `TrainingOptions::ema`
};

/// Where a training begins, and where its state is kept.
struct Checkpoints {
  /// Puts network and optimizer back. Empty: training begins at its first epoch.
  std::function<Snapshot(torch::optim::Optimizer&)> restore;
  /// Empty: nothing is kept.
  std::function<void(torch::optim::Optimizer&, const Snapshot&)> save;
  int64_t every = 0;         ///< epochs between two of them; 0: where training is interrupted alone
  std::string how_to_go_on;  ///< told with an interruption, once it is saved
};

/// How far an epoch is, told after each micro-batch.
struct Progress {
  int64_t epoch = 0;  ///< counted from 1
  int64_t done = 0;   ///< samples of this epoch
  int64_t total = 0;
  double loss = 0;     ///< of the last whole step; NaN before the first
  double seconds = 0;  ///< since the epoch began
};

struct EpochResult {
  int64_t epoch = 0;
  double loss = 0;                 ///< mean over the epoch's samples, each before its step
  std::optional<Scores> held_out;  ///< empty where nothing is held out
  /// Of the held-out samples, as asked for.
  std::vector<std::pair<std::string, double>> metrics;
  double seconds = 0;  ///< of training; measuring is not in it
  double samples_per_second = 0;
  int64_t peak_bytes = 0;  ///< steps, optimizer and measuring
  int64_t micro_batch_size = 0;
  int64_t restarts = 0;
  int64_t steps = 0;
  int64_t offloaded_bytes = 0;  ///< that left the device for host or disk in all of these steps
  std::string strategy;         ///< of the last step, and
  std::string strategy_reason;  ///< why; empty where nothing speaks for another one
};

/// What training tells while it runs.
class TrainingObserver {
 public:
  virtual ~TrainingObserver() = default;
  virtual void on_progress(const Progress& progress) = 0;
  virtual void on_epoch(const EpochResult& result) = 0;
};

/// Trains `network` (its parameters lie on `options.device`). On the CPU the budget is in force for
/// everything that this does: steps, the optimizer and measuring.
/// \throws Interrupted naming the last whole step; parameters are those after it
void train(std::shared_ptr<Network> network, const Dataset& data, const TrainingOptions& options,
           TrainingObserver& observer, const Checkpoints& checkpoints = {});

/// A logical batch that is never made as a whole: the rows at `indices` of a split.
/// \param rows must outlive the source
BatchSource source_of(const Split::Rows& rows, const at::Tensor& indices);

/// Samples per optimizer step.
int64_t batch_size_for(const StepOptions& options, const Dataset& data);

}  // namespace infinitybatch::app
