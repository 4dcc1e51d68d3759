#pragma once

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "models/network.hpp"

namespace infinitybatch::app {

struct StepOptions {
  std::optional<int64_t> batch_size = 512;  ///< samples per optimizer step; empty: all of them
  std::optional<int64_t> micro_batch_size;
  std::optional<int64_t> memory_budget;  ///< bytes
  std::string strategy = "auto";         ///< "auto", "stream" or "native"
  Offload offload;
};

struct StepOutcome {
  double loss = 0;
  int64_t micro_batch_size = 0;  ///< the largest of this step
  int64_t restarts = 0;
  int64_t offloaded_bytes = 0;  ///< that left the device for host or disk
};

/// The flags that VirtualBatch takes.
Options library_options(const StepOptions& options);

/// Adds the gradient over one logical batch to `.grad` of the network's parameters.
class Step {
 public:
  /// Told how many samples of the batch are done, after each micro-batch.
  using OnSamples = std::function<void(int64_t done)>;

  virtual ~Step() = default;
  virtual StepOutcome run(const BatchSource& inputs, const BatchSource& targets,
                          const OnSamples& on_samples) = 0;
};

/// The whole batch in one piece, as plain PyTorch does it. The memory budget is the caller's
/// memory::Limit: it ends the step with NativeOutOfMemory.
std::unique_ptr<Step> make_native_step(std::shared_ptr<Network> network, at::Device device);

/// A VirtualBatch. Ctrl-C ends it between micro-batches.
std::unique_ptr<Step> make_virtual_step(std::shared_ptr<Network> network,
                                        const StepOptions& options);

}  // namespace infinitybatch::app
