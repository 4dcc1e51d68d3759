#pragma once

#include "models/network.hpp"
#include "store/safetensors.hpp"

#include <infinitybatch/train/callback.hpp>

#include <memory>
#include <vector>

namespace infinitybatch::app {

/// `--ema`: decay * average + (1 - decay) * parameter after each step.
class Averages final : public Callback {
 public:
  Averages(std::shared_ptr<Network> network, double decay);

  void on_batch_end(const events::BatchEnd& event) override;

  /// The network has the averages in place of its parameters, until the next call.
  void swap();
  /// By the parameters' names. \throws DataError from `restore` where one is missing
  NamedTensors tensors() const;
  void restore(const NamedTensors& tensors);

 private:
  std::shared_ptr<Network> network_;
  double decay_;
  std::vector<at::Tensor> averages_;
};

}  // namespace infinitybatch::app
