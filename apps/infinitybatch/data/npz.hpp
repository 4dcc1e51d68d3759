#pragma once

#include "data/dataset.hpp"
#include "data/labelled.hpp"

#include <optional>
#include <string>

namespace infinitybatch::app {

/// The arrays of a .npz file that a data set is made of.
struct NpzData {
  Labelled train;
  std::optional<Labelled>
      held_out;  ///< of files that have x_test and y_test beside x_train, y_train
};

/// Finds inputs and labels among the arrays of a .npz file: those that `inputs` and `labels` of
/// `options` name, else the one with a usual name (inputs, x, images, …; labels, y, targets, …).

/// \throws DataError where a file cannot be read; UsageError where it is not clear which is meant
NpzData read_npz(const std::string& path, const DataOptions& options);

}  // namespace infinitybatch::app
