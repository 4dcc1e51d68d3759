#pragma once

#include "models/network.hpp"
#include "store/model_file.hpp"
#include "store/safetensors.hpp"
#include "train/training.hpp"

#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace infinitybatch::app {

/// Flags without their dashes, and their values as text.
using FlagValues = std::vector<std::pair<std::string, std::string>>;

/// Where the checkpoint of a model lies: model.checkpoint.safetensors beside model.safetensors.
std::string checkpoint_beside(const std::string& model_path);

/// A file of weights (evaluate, predict and export read it as one) with all that training needs to
/// go on with the same bits: optimizer state, random state, position, flags.
/// \throws SaveError
void save_checkpoint(const std::string& path, const Network& network,
                     torch::optim::Optimizer& optimizer, const ModelDescription& description,
                     const FlagValues& flags, const Snapshot& snapshot);

/// The flags of the training that wrote it. \throws DataError where it is no checkpoint
FlagValues flags_in(const StoredTensors& stored);

/// Where the training that wrote it was. \throws DataError
Snapshot snapshot_in(const StoredTensors& stored);

/// Puts back weights, optimizer state and random state. \throws DataError
void load_checkpoint(const StoredTensors& stored, Network& network,
                     torch::optim::Optimizer& optimizer);

}  // namespace infinitybatch::app
