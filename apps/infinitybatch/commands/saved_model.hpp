#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "options.hpp"
#include "store/model_file.hpp"

#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// What evaluate and predict begin with: a model from its file, and samples for it.
struct SavedModel {
  ModelDescription description;
  std::shared_ptr<Network> network;
  Dataset data;
  std::string samples;               ///< "held-out", "train" or, of other data, "all"
  std::vector<const Split*> splits;  ///< in `data`, none of them empty
  bool same_data = true;             ///< as the model was trained on

  int64_t size() const;
};

inline constexpr const char* kOtherData =
    "note: other data than the model was trained on; its classes, columns and scaling apply";

/// Samples at once, halved where they do not fit.
int64_t slice_of(const Settings& settings);

/// \throws DataError where file, model and data do not suit each other, UsageError
std::unique_ptr<SavedModel> open_saved_model(const Settings& settings);

}  // namespace infinitybatch::app
