#include <infinitybatch/execute/gradient_look.hpp>

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/autograd/own_backward.hpp>
#include <infinitybatch/execute/relative_distance.hpp>
#include <infinitybatch/execute/row_difference.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace infinitybatch {
namespace {

using Gradients = std::vector<at::Tensor>;

at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.is_sparse() ? tensor.to_dense() : tensor.detach();
  return plain.is_complex() ? at::view_as_real(plain.resolve_conj()) : plain;
}

/// Of all together: gradients that cancel in a whole parameter are rounding and nothing else.
double norm(const Gradients& gradients) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const at::Tensor& each : gradients) {
    if (each.defined()) sum += std::pow(dense(each).to(at::kDouble).norm().item<double>(), 2);
  }
  return std::sqrt(sum);
}

Gradients combined(const Gradients& first, const Gradients& second, double factor) {
  const at::NoGradGuard no_grad;
  Gradients result(first.size());
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].defined()) result[i] = dense(first[i]).to(at::kDouble);
    if (!second[i].defined()) continue;
    const at::Tensor other = dense(second[i]).to(at::kDouble).mul(factor);
    result[i] = result[i].defined() ? result[i].add(other) : other;
  }
  return result;
}

double rounding(const Gradients& gradients) {
  double most = 0;
  for (const at::Tensor& each : gradients) {
    if (each.defined()) most = std::max(most, rounding_of(each));
  }
  return most;
}

}  // namespace

std::optional<std::string> GradientLook::find(const Batch& inputs, int64_t rows,
                                              const std::vector<int64_t>& dims) const {
  const int64_t half = rows / 2;
  const auto of = [&](const Batch& from, Rows part) {
    return run(infinitybatch::rows(from, part.begin, part.end), part, dims);
  };
  const auto whole = of(inputs, {0, rows});
  if (!whole) return std::nullopt;
  const auto first = of(inputs, {0, half});
  const auto second = first ? of(inputs, {half, rows}) : std::nullopt;
  if (!second) return std::nullopt;
  const double size = norm(*whole);
  const double apart = norm(combined(combined(*first, *second, 1), *whole, -1));
  if (!std::isfinite(apart) || !std::isfinite(size)) return std::nullopt;
  if (apart <= rounding(*whole) * size) return std::nullopt;
  const auto moved = of(moved_by_rounding(inputs), {0, rows});
  if (!moved) return std::nullopt;
  constexpr double kNoisy = 64;  // times what rounding of the inputs moves
  if (apart <= kNoisy * norm(combined(*moved, *whole, -1))) return std::nullopt;
  std::ostringstream text;
  text << "the gradient of samples 0 to " << rows - 1 << " is not the sum of those of its halves";
  if (size > 0) text << " (by " << apart / size << " relative)";
  text << ", though their outputs are: an autograd.Function or a hook of the model's";
  return text.str();
}

std::optional<bool> own_backward_of(const Batch& outputs) {
  std::vector<at::Tensor> roots;
  for (const Leaf& leaf : outputs.leaves()) {
    if (leaf.tensor.defined() && leaf.tensor.requires_grad()) roots.push_back(leaf.tensor);
  }
  if (roots.empty()) return std::nullopt;
  return autograd::has_own_backward(roots);
}

std::vector<at::Tensor> gradients_by(const std::vector<NamedParameter>& parameters,
                                     const at::Tensor& number) {
  std::vector<at::Tensor> gradients(parameters.size());
  std::vector<size_t> of;
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    if (!tensor.requires_grad() || !tensor.is_leaf() || autograd::has_hooks(tensor)) continue;
    of.push_back(i);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  if (edges.empty()) return gradients;
  std::vector<at::Tensor> found = autograd::gradients_at(number, edges);
  for (size_t i = 0; i < of.size(); ++i) gradients[of[i]] = std::move(found[i]);
  return gradients;
}

at::Tensor weighed(const Batch& outputs, const std::vector<int64_t>& dims,
                   const std::vector<bool>& compared, Rows rows) {
  at::Tensor sum;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& output = outputs.leaves()[i].tensor;
    if (!output.defined() || !output.requires_grad() || output.layout() != at::kStrided) continue;
    if (i < compared.size() && !compared[i]) continue;
    const int64_t dim = i < dims.size() ? dims[i] : -1;
    if (dim < 0 || dim >= output.dim() || output.numel() == 0) continue;
    const int64_t each = output.size(dim) / rows.size();
    if (each * rows.size() != output.size(dim)) continue;
    const at::Tensor moved = output.movedim(dim, 0);
    const at::Tensor places = at::arange(output.numel() / rows.size(), at::kDouble);
    const at::Tensor samples = at::arange(rows.begin, rows.end, at::kDouble);
    const at::Tensor factors = (samples.mul(1.7).unsqueeze(1) + places.mul(0.9).unsqueeze(0)).sin();
    const at::Tensor numbers = moved.is_complex() ? at::real(moved) + at::imag(moved) : moved;
    const at::Tensor wide = numbers.scalar_type() == at::kDouble ? numbers : numbers.to(at::kFloat);
    const at::Tensor share = (wide * factors.to(wide.options()).view(moved.sizes())).sum();
    sum = sum.defined() ? sum + share : share;
  }
  return sum;
}

}  // namespace infinitybatch
