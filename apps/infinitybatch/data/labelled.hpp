#pragma once

#include "data/dataset.hpp"

#include <ATen/core/TensorBody.h>

#include <string>

namespace infinitybatch::app {

/// Inputs and the class of each, as they lie in their files.
struct Labelled {
  std::string inputs_name;
  std::string labels_name;
  at::Tensor inputs;  ///< [n, features], [n, height, width] or [n, channels, height, width]
  at::Tensor labels;  ///< [n], of any integer type
  /// What reading them has told: all but mean and deviation.
  Encoding encoding = {"arrays"};
};

/// Inputs are scaled by mean and deviation of `train`, or by those that are known.

/// A data set of `train`, with every 1/`held_out`-th row kept for measuring: evenly spread, so the
/// split is the same on every machine and right for sorted files too.
Dataset split_labelled(const std::string& name, const Labelled& train, double held_out,
                       const Encoding* known);

/// A data set whose files are split already.
Dataset join_labelled(const std::string& name, const Labelled& train, const Labelled& held_out,
                      const Encoding* known);

}  // namespace infinitybatch::app
