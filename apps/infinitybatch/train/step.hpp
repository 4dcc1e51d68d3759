#pragma once

#include "models/network.hpp"

#include <infinitybatch/train/gradient_step.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch::app {

struct StepOptions {
  std::optional<int64_t> batch_size = 512;  ///< samples per optimizer step; empty: all of them
  std::optional<int64_t> micro_batch_size;
  std::optional<int64_t> memory_budget;  ///< bytes
  std::string strategy = "auto";         ///< "auto", "stream" or "native"
  Offload offload;
};

/// The flags that VirtualBatch takes. Ctrl-C ends its steps between micro-batches.
Options library_options(const StepOptions& options);

/// The whole batch in one piece, as plain PyTorch does it. The memory budget is the caller's
/// memory::Limit: it ends the step with NativeOutOfMemory.
std::unique_ptr<GradientStep> make_native_step(std::shared_ptr<Network> network, at::Device device,
                                               bool amp = false);

}  // namespace infinitybatch::app
