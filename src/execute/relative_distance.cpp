#include "execute/relative_distance.hpp"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace infinitybatch {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool is_half(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

// As many numbers are worked on at once: outputs may be all that a budget leaves room for. On an
// accelerator, where each kernel takes as long to begin as the CPU takes for some thousands, no
// more pieces than these.
constexpr int64_t kComparedAtOnce = 1 << 14;
constexpr int64_t kPiecesOnAccelerators = 32;
// As many tell what is usual.
constexpr int64_t kSampledSizes = 1 << 14;

int64_t compared_at_once(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return kComparedAtOnce;
  return std::max(kComparedAtOnce, tensor.numel() / kPiecesOnAccelerators);
}

template <typename Visit>
void in_pieces(const at::Tensor& a, const at::Tensor& b, int64_t at_once, const Visit& visit) {
  if (a.numel() <= at_once) return visit(a, b);
  const auto sizes = a.sizes();
  const int64_t dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const int64_t half = a.size(dim) / 2;
  in_pieces(a.narrow(dim, 0, half), b.narrow(dim, 0, half), at_once, visit);
  in_pieces(a.narrow(dim, half, a.size(dim) - half), b.narrow(dim, half, a.size(dim) - half),
            at_once, visit);
}

double usual_size(const at::Tensor& given, const at::Tensor& other, at::ScalarType wide) {
  const int64_t step = std::max<int64_t>(1, given.numel() / kSampledSizes);
  std::vector<at::Tensor> sampled;
  in_pieces(given, other, compared_at_once(given), [&](const at::Tensor& a, const at::Tensor& b) {
    const auto some = [&](const at::Tensor& numbers) {
      return numbers.reshape({-1}).slice(0, 0, numbers.numel(), step).to(wide).abs();
    };
    sampled.push_back(at::maximum(some(a), some(b)));
  });
  const at::Tensor sizes = at::cat(sampled);
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
    at::Tensor unlike;
    in_pieces(given, other, compared_at_once(given), [&](const at::Tensor& a, const at::Tensor& b) {
      const at::Tensor here = a.ne(b).sum();
      unlike = unlike.defined() ? unlike.add(here) : here;
    });
    // A rounding may turn one choice among thousands.
    const auto count = static_cast<double>(unlike.item<int64_t>());
    return count > 0.01 * static_cast<double>(given.numel()) ? kNever : 0;
  }
  const at::ScalarType wide = given.is_complex() ? at::kComplexDouble : at::kDouble;
  const double least = std::max(usual_size(given, other, wide), std::numeric_limits<double>::min());
  at::Tensor most;
  in_pieces(given, other, compared_at_once(given),
            [&](const at::Tensor& some, const at::Tensor& others) {
              const at::Tensor a = some.to(wide);
              const at::Tensor b = others.to(wide);
              const at::Tensor sizes = at::maximum(a.abs(), b.abs()).clamp_min_(least);
              const at::Tensor same = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
              at::Tensor apart = (a - b).abs().div_(sizes);
              apart = apart.masked_fill(apart.isnan(), kNever).masked_fill(same, 0.0);
              const at::Tensor here = apart.max();
              most = most.defined() ? at::maximum(most, here) : here;
            });
  return most.item<double>();
}

}  // namespace infinitybatch
