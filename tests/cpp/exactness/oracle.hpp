#pragma once

#include "exactness/subject.hpp"

#include <infinitybatch/core/model.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace infinitybatch::testing {

/// A loss and the gradient of every parameter; undefined where there is none.
struct Gradients {
  at::Tensor loss;
  std::vector<NamedParameter> parameters;
};

/// What native PyTorch gives for the whole batch at once.
Gradients native(Subject& subject, const CriterionCase& criterion, const Data& data, bool autocast);

/// Copies of what is in `.grad` now.
Gradients gradients_of(Subject& subject, const at::Tensor& loss);

/// For the loss (first) and each parameter in order, the norm of the difference between `value` and
/// `reference`, divided by the norm of `reference`; by the largest norm of all where that gradient
/// is truly zero. Infinite where inf and NaN stand in different places, or a gradient is missing or
/// too much.
std::vector<double> errors(const Gradients& value, const Gradients& reference);

/// Contract 1 in float64: 1e-12, or ten times what native itself moves when the batch is reversed.
void expect_exact_double(const Gradients& ours, const Gradients& reference,
                         const Gradients& reference_reversed);

/// Contract 1 in `type`: twice native's own error, or `roundings` (eight) of `type`. With a few
/// numbers the rounding error of one order of the batch is luck, so native's own is the largest
/// over its rotations, forwards and backwards; `native_of` is asked for no more of them than it
/// takes.
void expect_exact_single(const Gradients& ours, const Gradients& reference, at::ScalarType type,
                         double roundings, const Data& data, int64_t samples,
                         const std::function<Gradients(const Data&)>& native_of);

}  // namespace infinitybatch::testing
