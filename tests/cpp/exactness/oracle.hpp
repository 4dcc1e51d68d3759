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
/// `reference`, divided by the norm of `reference`; by the largest norm of all where that gradient is
/// truly zero. Infinite where inf and NaN stand in different places, or a gradient is missing or too
/// much.
std::vector<double> errors(const Gradients& value, const Gradients& reference);

/// Contract 1 in float64: 1e-12, or ten times what native itself moves when the batch is reversed.
void expect_exact_double(const Gradients& ours, const Gradients& reference,
                         const Gradients& reference_reversed);

/// Contract 1 in `type`: twice native's own error, or eight roundings of `type`.
/// \param natives what native gives in `type` for several orders of the batch. With a few numbers one
///                order's rounding error is luck: the largest is native's own.
void expect_exact_single(const Gradients& ours, const std::vector<Gradients>& natives,
                         const Gradients& reference, at::ScalarType type);

}  // namespace infinitybatch::testing
