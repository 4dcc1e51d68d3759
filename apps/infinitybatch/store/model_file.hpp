#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "store/safetensors.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch::app {

/// What a file of weights says of its model: enough to make it, and to measure it on what was held
/// out of the data that it was trained on, or on other data.
struct ModelDescription {
  ModelOptions model;
  DataOptions data;
  SampleKind kind = SampleKind::images;
  std::vector<int64_t> sample_shape;
  int64_t classes = 0;
  std::string fingerprint;           ///< of the training samples, as scaled
  std::optional<Encoding> encoding;  ///< files of earlier versions have none
};

ModelDescription describe_model(const ModelOptions& model, const DataOptions& options,
                                const Dataset& data);

/// Says whether two data sets give a network the same numbers: their sizes, and the first samples
/// as scaled, which depend on the mean and deviation of all.
std::string fingerprint_of(const Dataset& data);

nlohmann::ordered_json as_json(const ModelDescription& description);

/// Parameters and buffers by the names that torch gives them.
NamedTensors weights_of(const Network& network);

/// Weights as `torch.load_state_dict` wants them, and the description in the metadata.
/// \throws SaveError
void save_model(const std::string& path, const Network& network,
                const ModelDescription& description);

/// \throws DataError where no model is described
ModelDescription description_in(const StoredTensors& stored);

/// The model that a file describes, with its weights. \throws DataError where they do not fit it
std::shared_ptr<Network> network_in(const StoredTensors& stored,
                                    const ModelDescription& description);

/// Copies weights by name, all or (thrown before the first) none. Names with a slash are of others.
/// \throws DataError naming the first tensor that is missing, too much or of another shape or type
void load_weights(Network& network, const StoredTensors& stored);

}  // namespace infinitybatch::app
