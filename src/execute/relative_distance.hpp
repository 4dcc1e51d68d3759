#pragma once

#include <ATen/core/TensorBody.h>

namespace infinitybatch {

/// The largest distance of two numbers at the same place, in terms of their size or of what is
/// usual; infinite where forms differ.
double relative_distance(const at::Tensor& given, const at::Tensor& other);
/// The same of each place along one dimension, on the host; undefined where forms differ. Numbers
/// that are no floats are infinitely far apart wherever they differ.
at::Tensor relative_distances(const at::Tensor& given, const at::Tensor& other, int64_t dim);
/// As much of it is rounding: 4e-12 in fp64, 1e-4 in fp32, 2e-2 in half precision, under autocast,
/// and where kernels may round so.
double rounding_of(const at::Tensor& tensor);
/// Whether it is that of a short type: many times what such a rounding moves would be anything.
inline bool is_coarse(double rounding) {
  return rounding > 1e-3;
}

}  // namespace infinitybatch
