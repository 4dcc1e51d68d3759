#include "core/exchange.hpp"

#include "core/bits.hpp"
#include "core/sample_rows.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace infinitybatch {
namespace {

constexpr double kTolerance = 1e-4;
constexpr double kHalfTolerance = 2e-2;
// As many elements tell what is usual.
constexpr int64_t kSampled = 4096;

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool is_inexact(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

/// Sizes that stand for infinity (masked scores) do not move the median of the others much.
double usual_size(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.reshape({-1});
  const int64_t step = std::max<int64_t>(1, flat.numel() / kSampled);
  at::Tensor sizes = flat.slice(0, 0, flat.numel(), step).abs().to(at::kFloat);
  return sizes.nan_to_num(0.0).median().item<double>();
}

at::Tensor differs(const at::Tensor& a, const at::Tensor& b, double least) {
  if (!is_inexact(a)) return a.ne(b);
  const double tolerance = is_half(a) ? kHalfTolerance : kTolerance;
  const at::Tensor x = is_half(a) ? a.to(at::kFloat) : a;
  const at::Tensor y = is_half(a) ? b.to(at::kFloat) : b;
  const at::Tensor allowed = at::maximum(x.abs(), y.abs()).clamp_min_(least).mul_(tolerance);
  // Where one of them is no number they are not close; two infinities are equal.
  const at::Tensor close = (x - y).abs_().le(allowed);
  const at::Tensor same = x.eq(y).logical_or_(x.isnan().logical_and_(y.isnan()));
  // An infinite bound allows nothing.
  return close.logical_and_(allowed.isfinite()).logical_or_(same).logical_not_();
}

/// What is drawn "like" a tensor is drawn in the order of its memory, and dimensions that are
/// expanded have none: the same for other rows.
at::Tensor lying_like(const at::Tensor& given, const at::Tensor& moved) {
  if (given.layout() != at::kStrided || given.is_contiguous() || given.is_quantized()) return moved;
  at::Tensor once = given.detach();
  at::Tensor moved_once = moved;
  for (int64_t dim = 0; dim < given.dim(); ++dim) {
    if (given.stride(dim) != 0 || given.size(dim) == 0) continue;
    once = once.narrow(dim, 0, 1);
    moved_once = moved_once.narrow(dim, 0, 1);
  }
  return at::empty_like(once).copy_(moved_once).expand(given.sizes());
}

/// For each index of a dimension: whether anything is true there.
std::vector<bool> any_along(const at::Tensor& mask, int64_t dim, int64_t size) {
  std::vector<bool> found(static_cast<size_t>(size), false);
  if (!mask.defined()) return found;
  const at::Tensor any = mask.transpose(0, dim).reshape({size, -1}).any(1).to(at::kCPU);
  for (int64_t i = 0; i < size; ++i) found[static_cast<size_t>(i)] = any[i].item<bool>();
  return found;
}

}  // namespace

std::optional<Exchanges> exchanges_of(const Batch& inputs, int64_t rows) {
  if (rows < 2) return std::nullopt;
  Exchanges exchanges;
  exchanges.rows = rows;
  exchanges.kept = rows - 1;
  const auto alike = [&](int64_t other) {
    return std::all_of(inputs.leaves().begin(), inputs.leaves().end(), [&](const Leaf& leaf) {
      if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) return true;
      const at::Tensor here = leaf.tensor.detach();
      return at::equal(here.select(leaf.batch_dim, exchanges.kept),
                       here.select(leaf.batch_dim, other));
    });
  };
  int64_t other = exchanges.kept - 1;
  while (other >= 0 && alike(other)) --other;
  if (other < 0) return std::nullopt;
  exchanges.others.assign(static_cast<size_t>(rows), exchanges.kept);
  exchanges.itself.resize(static_cast<size_t>(rows));
  std::iota(exchanges.itself.begin(), exchanges.itself.end(), 0);
  exchanges.itself[static_cast<size_t>(exchanges.kept)] = other;
  return exchanges;
}

at::Tensor exchanged(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& order) {
  const at::NoGradGuard no_grad;
  const at::Tensor given = tensor.detach();
  return lying_like(given, in_order(given, dim, order));
}

Batch exchanged(const Batch& batch, const std::vector<int64_t>& order) {
  const at::NoGradGuard no_grad;
  const Batch moved = in_order(batch, order);
  std::vector<Leaf> leaves = moved.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].tensor.defined()) continue;
    leaves[i].tensor = lying_like(batch.leaves()[i].tensor, leaves[i].tensor);
  }
  return {std::move(leaves), batch.structure()};
}

at::Tensor differences(const at::Tensor& a, const at::Tensor& b, int64_t parts) {
  const at::NoGradGuard no_grad;
  if (!a.defined() || !b.defined() || a.layout() != at::kStrided || b.layout() != at::kStrided ||
      a.is_quantized() || !same_form(a, b) || a.numel() == 0) {
    return {};
  }
  const at::Tensor x = a.detach().resolve_conj().resolve_neg();
  const at::Tensor y = b.detach().resolve_conj().resolve_neg();
  const double least = is_inexact(x) ? usual_size(x) : 0;
  at::Tensor found;
  if (x.dim() == 0) {
    found = differs(x, y, least);
  } else {
    found = at::empty(x.sizes(), x.options().dtype(at::kBool));
    const int64_t piece = (x.size(0) + parts - 1) / parts;
    for (int64_t i = 0; i < x.size(0); i += piece) {
      const int64_t count = std::min(piece, x.size(0) - i);
      found.narrow(0, i, count).copy_(differs(x.narrow(0, i, count), y.narrow(0, i, count), least));
    }
  }
  return found.any().item<bool>() ? found : at::Tensor();
}

bool mixes(const at::Tensor& by_others, const at::Tensor& by_itself, at::IntArrayRef sizes,
           const Exchanges& exchanges) {
  const auto kept = static_cast<size_t>(exchanges.kept);
  bool moved =
      false;  // along some dimension each place depends on one sample, but on the wrong one
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != exchanges.rows) continue;
    const auto dim = static_cast<int64_t>(d);
    const std::vector<bool> others = any_along(by_others, dim, exchanges.rows);
    const std::vector<bool> itself = any_along(by_itself, dim, exchanges.rows);
    bool own = true;
    bool single = true;
    for (size_t i = 0; i < others.size(); ++i) {
      own = own && !(i == kept ? others[i] : itself[i]);
      single = single && !(others[i] && itself[i]);
    }
    if (own) return false;
    moved = moved || single;
  }
  if (moved) return true;
  return by_others.defined() && by_itself.defined() &&
         by_others.logical_and(by_itself).any().item<bool>();
}

}  // namespace infinitybatch
