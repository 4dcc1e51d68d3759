#pragma once

#include <ATen/core/TensorBody.h>

namespace infinitybatch {

/// The largest distance of two numbers at the same place, in terms of their size or of what is
/// usual; infinite where forms differ.
double relative_distance(const at::Tensor& given, const at::Tensor& other);
/// As much of it is rounding: 4e-12 in fp64, 1e-4 in fp32, 2e-2 in half precision, under autocast,
/// and where kernels may round so.
double rounding_of(const at::Tensor& tensor);

}  // namespace infinitybatch
