#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::app {

struct OptimizerOptions {
  std::string name = "adam";  ///< "sgd" (momentum 0.9), "adam", "adamw", "rmsprop", "adagrad"
  std::optional<double> lr;   ///< empty: the optimizer's own default, see `default_lr`
};

/// The learning rate that `name` gets where none is given. \throws UsageError as `make_optimizer`
double default_lr(const std::string& name);

/// One of LibTorch's optimizers.
/// \throws UsageError for an unknown name, and for "lbfgs", which asks for the loss several times a
///         step and so cannot work with one gradient per logical batch
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerOptions& options,
                                                        std::vector<at::Tensor> parameters);

}  // namespace infinitybatch::app
