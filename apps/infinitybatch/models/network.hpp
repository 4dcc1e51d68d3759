#pragma once

#include "data/dataset.hpp"

#include <infinitybatch/command_line/network.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// A model of one tensor that gives class scores: [n, classes], or [n, classes, context] for text.
using Network = command_line::Network;

/// Which model, and how large. 0 means the model's own default.
struct ModelOptions {
  /// One of `model_names`, or the path of a shared library; empty: what suits the data.
  std::string model;
  int64_t width = 0;     ///< units, channels or embedding size
  int64_t depth = 0;     ///< hidden layers, convolutions, blocks a stage, transformer layers
  int64_t context = 64;  ///< bytes that a transformer sees at once
};

/// The names of all models, as `--model` takes them.
const std::vector<std::string>& model_names();

/// Fills in `model`, `width` and `depth` where they were left open.
/// \throws UsageError where there is no such model, or it cannot take such samples
void complete(ModelOptions& options, const Dataset& data);

/// How large a model is that nobody has made. Not in integers: sizes may be any.
struct NetworkSize {
  double parameters;  ///< numbers
  double tensors;     ///< that they lie in
};

/// \param options complete
/// \returns nothing for a network of the user's own
std::optional<NetworkSize> size_of_network(const ModelOptions& options, const Dataset& data);

/// Makes the model that `options` name for such data; parameters from torch's default generator.
/// \param[in,out] options `model`, `width` and `depth` are filled in where they were left open
/// \throws UsageError where the model cannot take such samples
std::shared_ptr<Network> make_network(ModelOptions& options, const Dataset& data);

/// What stands behind each convolution of a residual network.
enum class Normalization : uint8_t {
  batch,  ///< BatchNorm, as He et al. 2015 have it: over the whole logical batch
  group,  ///< GroupNorm (Wu and He 2018): no sample's output depends on another's
};

/// One maker a model, each in its own file.
std::shared_ptr<Network> make_mlp(int64_t features, int64_t width, int64_t depth, int64_t classes);
std::shared_ptr<Network> make_convnet(int64_t channels, int64_t width, int64_t depth,
                                      int64_t classes);
std::shared_ptr<Network> make_resnet(Normalization kind, int64_t channels, int64_t width,
                                     int64_t depth, int64_t classes);
std::shared_ptr<Network> make_transformer(int64_t symbols, int64_t context, int64_t width,
                                          int64_t depth);

}  // namespace infinitybatch::app
