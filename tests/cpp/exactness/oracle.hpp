#pragma once

#include "exactness/subject.hpp"

#include <infinitybatch/core/model.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch::testing {

/// A loss and the gradient of every parameter; undefined where there is none.
struct Gradients {
  at::Tensor loss;
  std::vector<NamedParameter> parameters;
};

/// A way to compute the same loss of the same batch natively, with roundings of its own.
struct Way {
  std::vector<int64_t> order;  ///< place i holds sample order[i]; empty: as they are
  int64_t rows = 0;            ///< samples in a call of the model, the last with fewer; 0: all
  double loss_scale = 1;       ///< backward starts from it; gradients are divided by it in float64
};

/// What native PyTorch gives for the whole batch: one loss of all outputs, one backward.
Gradients native(Subject& subject, const CriterionCase& criterion, const Data& data, bool autocast,
                 const Way& way = {});

/// Copies of what is in `.grad` now.
Gradients gradients_of(Subject& subject, const at::Tensor& loss);

/// For the loss (first) and each parameter in order, the norm of the difference between `value` and
/// `reference`, divided by the norm of `reference`; by the largest norm of all where that gradient
/// is truly zero. Infinite where inf and NaN stand in different places, or a gradient is missing or
/// too much.
std::vector<double> errors(const Gradients& value, const Gradients& reference);

/// A value (the loss or a parameter's gradient) that lies further off than allowed.
struct Excess {
  std::string name;
  double found, allowed;
};

/// Values outside of contract 1 in float64: 1e-12, or ten times what native itself moves when the
/// batch is reversed.
std::vector<Excess> excess_in_double(const Gradients& ours, const Gradients& reference,
                                     const Gradients& reference_reversed);

/// Values outside of contract 1 in `type`: twice native's own error, or eight roundings.
///
/// One run says little of native's own error: the three numbers of a bias whose terms all but
/// cancel come out right to the last bit, or a hundred roundings off, as luck has it. So it is the
/// largest over ways that leave what is computed as it is: random orders of the batch move the
/// roundings of sums over samples, random scales of the loss those of every product in backward,
/// and calls with fewer rows, for which torch takes other kernels, those of forward. All ways are
/// the same in every run. Where native in `type` has NaN in other places than `reference` (kernels
/// multiply the zeros of a padding, or skip them), the places of any of these ways are right.
/// \param native_of native's values; asked for no more ways than it takes
std::vector<Excess> excess_in_single(const Gradients& ours, const Gradients& reference,
                                     at::ScalarType type, int64_t samples,
                                     const std::function<Gradients(const Way&)>& native_of);

}  // namespace infinitybatch::testing
