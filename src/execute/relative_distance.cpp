#include "execute/relative_distance.hpp"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <limits>
#include <optional>
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

/// \param visit `void(a, b, first)`: pieces that begin at the place `first` of dimension 0
template <typename Visit>
void in_pieces(const at::Tensor& a, const at::Tensor& b, int64_t at_once, const Visit& visit,
               int64_t first = 0) {
  if (a.numel() <= at_once) return visit(a, b, first);
  const auto sizes = a.sizes();
  const int64_t dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const int64_t half = a.size(dim) / 2, rest = a.size(dim) - half;
  in_pieces(a.narrow(dim, 0, half), b.narrow(dim, 0, half), at_once, visit, first);
  in_pieces(a.narrow(dim, half, rest), b.narrow(dim, half, rest), at_once, visit,
            first + (dim == 0 ? half : 0));
}

double usual_size(const at::Tensor& given, const at::Tensor& other, at::ScalarType wide) {
  const int64_t step = std::max<int64_t>(1, given.numel() / kSampledSizes);
  std::vector<at::Tensor> sampled;
  const auto sample = [&](const at::Tensor& a, const at::Tensor& b, int64_t) {
    const auto some = [&](const at::Tensor& numbers) {
      return numbers.reshape({-1}).slice(0, 0, numbers.numel(), step).to(wide).abs();
    };
    sampled.push_back(at::maximum(some(a), some(b)));
  };
  in_pieces(given, other, compared_at_once(given), sample);
  const at::Tensor sizes = at::cat(sampled);
  // Not those that are switched off.
  const at::Tensor finite = sizes.masked_select(sizes.isfinite().logical_and_(sizes.ne(0)));
  return finite.numel() == 0 ? 0 : finite.median().item<double>();
}

bool has_floats(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

/// Of each number; what is no number is as far from any other as can be.
class Distances {
 public:
  Distances(const at::Tensor& given, const at::Tensor& other)
      : wide_(given.is_complex() ? at::kComplexDouble : at::kDouble),
        least_(std::max(usual_size(given, other, wide_), std::numeric_limits<double>::min())) {}

  at::Tensor of(const at::Tensor& some, const at::Tensor& others) const {
    const at::Tensor a = some.to(wide_);
    const at::Tensor b = others.to(wide_);
    const at::Tensor sizes = at::maximum(a.abs(), b.abs()).clamp_min_(least_);
    const at::Tensor same = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
    const at::Tensor apart = (a - b).abs().div_(sizes);
    return apart.masked_fill(apart.isnan(), kNever).masked_fill(same, 0.0);
  }

 private:
  at::ScalarType wide_;
  double least_;
};

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
  const int64_t at_once = compared_at_once(given);
  if (!has_floats(given)) {
    at::Tensor unlike;
    const auto count = [&](const at::Tensor& a, const at::Tensor& b, int64_t) {
      const at::Tensor here = a.ne(b).sum();
      unlike = unlike.defined() ? unlike.add(here) : here;
    };
    in_pieces(given, other, at_once, count);
    // A rounding may turn one choice among thousands.
    const auto counted = static_cast<double>(unlike.item<int64_t>());
    return counted > 0.01 * static_cast<double>(given.numel()) ? kNever : 0;
  }
  const Distances distances(given, other);
  at::Tensor most;
  const auto meet = [&](const at::Tensor& a, const at::Tensor& b, int64_t) {
    const at::Tensor here = distances.of(a, b).max();
    most = most.defined() ? at::maximum(most, here) : here;
  };
  in_pieces(given, other, at_once, meet);
  return most.item<double>();
}

at::Tensor relative_distances(const at::Tensor& given, const at::Tensor& other, int64_t dim) {
  if (given.sizes() != other.sizes() || given.scalar_type() != other.scalar_type()) return {};
  const bool floats = has_floats(given);
  std::optional<Distances> distances;
  if (floats && given.numel() > 0) distances.emplace(given, other);
  const auto of = [&](const at::Tensor& a, const at::Tensor& b) {
    if (floats) return distances->of(a, b);
    const at::Tensor same = at::zeros(a.sizes(), a.options().dtype(at::kDouble));
    return same.masked_fill_(a.ne(b), kNever);
  };
  at::Tensor most = at::zeros({given.size(dim)}, given.options().dtype(at::kDouble));
  const auto meet = [&](const at::Tensor& a, const at::Tensor& b, int64_t first) {
    at::Tensor here = most.narrow(0, first, a.size(0));
    here.copy_(at::maximum(here, of(a, b).reshape({a.size(0), -1}).amax(1)));
  };
  if (given.numel() == 0) return most.cpu();
  in_pieces(given.movedim(dim, 0), other.movedim(dim, 0), compared_at_once(given), meet);
  return most.cpu();
}

}  // namespace infinitybatch
