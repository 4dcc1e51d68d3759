#pragma once

#include <torch/headeronly/version.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

/// A model of your own for the command line, in a shared library that `train --model libnet.so`
/// names:
///
///     #include <infinitybatch/command_line/network.hpp>
///     struct Net final : infinitybatch::command_line::Network {
///       torch::nn::Linear layer{nullptr};
///       explicit Net(const infinitybatch::command_line::Samples& samples) {
///         layer = register_module("layer", torch::nn::Linear(samples.shape[0], samples.classes));
///       }
///       at::Tensor forward(const at::Tensor& inputs) override { return layer(inputs); }
///     };
///     INFINITYBATCH_NETWORK(Net)
///
/// Linked against the torch that infinitybatch was built with, whose libraries are loaded already.
namespace infinitybatch::command_line {

/// Gives class scores in float32: [n, classes] of float32 samples [n, shape...], or [n, classes,
/// context] of int64 bytes [n, context].
class Network : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& inputs) = 0;
};

/// What --data holds, and what the model's flags say.
struct Samples {
  std::vector<int64_t> shape;  ///< of one: [features], [channels, height, width] or [context]
  int64_t classes = 0;
  int64_t width = 0;  ///< --width, or 0 where it was not given
  int64_t depth = 0;  ///< --depth, likewise
};

}  // namespace infinitybatch::command_line

#define INFINITYBATCH_TEXT_OF(x) #x
#define INFINITYBATCH_TEXT(x) INFINITYBATCH_TEXT_OF(x)
/// What a shared library and the program that loads it must agree on.
#define INFINITYBATCH_NETWORK_VERSION                                                   \
  "interface 1, torch " INFINITYBATCH_TEXT(TORCH_VERSION_MAJOR) "." INFINITYBATCH_TEXT( \
      TORCH_VERSION_MINOR) "." INFINITYBATCH_TEXT(TORCH_VERSION_PATCH)

/// Once in a shared library: `Net` is made of `const Samples&`.
#define INFINITYBATCH_NETWORK(Net)                                      \
  extern "C" const char* infinitybatch_network_version() {              \
    return INFINITYBATCH_NETWORK_VERSION;                               \
  }                                                                     \
  extern "C" void infinitybatch_make_network(                           \
      const infinitybatch::command_line::Samples& samples,              \
      std::shared_ptr<infinitybatch::command_line::Network>& network) { \
    network = std::make_shared<Net>(samples);                           \
  }
