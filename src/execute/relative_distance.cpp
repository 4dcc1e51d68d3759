#include "execute/relative_distance.hpp"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <limits>

namespace infinitybatch {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool is_half(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

double usual_size(const at::Tensor& sizes) {
  // Not those that are switched off.
  const at::Tensor finite = sizes.masked_select(sizes.isfinite().logical_and_(sizes.ne(0)));
  return finite.numel() == 0 ? 0 : finite.median().item<double>();
}

}  // namespace

double rounding_of(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  const bool coarse = is_half(type) || at::autocast::is_autocast_enabled(tensor.device().type());
  if (coarse) return 2e-2;
  if (type == at::kDouble || type == at::kComplexDouble) return 4e-12;
  const bool exact_products =
      tensor.device().is_cpu() &&
      at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  return exact_products ? 1e-4 : 2e-2;
}

double relative_distance(const at::Tensor& given, const at::Tensor& other) {
  if (given.sizes() != other.sizes() || given.scalar_type() != other.scalar_type()) return kNever;
  if (given.numel() == 0) return 0;
  if (!given.is_floating_point() && !given.is_complex()) {
    // A rounding may turn one choice among thousands.
    const double share = given.ne(other).to(at::kDouble).mean().item<double>();
    return share > 0.01 ? kNever : 0;
  }
  const at::ScalarType wide = given.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor a = given.to(wide);
  const at::Tensor b = other.to(wide);
  const at::Tensor sizes = at::maximum(a.abs(), b.abs());
  const double least = std::max(usual_size(sizes), std::numeric_limits<double>::min());
  const at::Tensor same = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
  at::Tensor apart = (a - b).abs().div_(sizes.clamp_min(least));
  apart = apart.masked_fill(apart.isnan(), kNever).masked_fill(same, 0.0);
  return apart.max().item<double>();
}

}  // namespace infinitybatch
