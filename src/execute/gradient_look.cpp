#include "execute/gradient_look.hpp"

#include "autograd/engine.hpp"
#include "autograd/own_backward.hpp"
#include "core/torch_compat.hpp"
#include "execute/relative_distance.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

namespace infinitybatch {
namespace {

/// Stands where a parameter's gradient would end, and lets go of it.
class Shown final : public torch::autograd::Node {
 public:
  Shown(const at::Tensor& parameter, size_t place, const ShowGradient& show)
      : Node(/*sequence_nr=*/UINT64_MAX), place_(place), show_(show) {
    add_input_metadata(parameter);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (gradients[0].defined()) show_(place_, gradients[0]);
    return {at::Tensor()};
  }

 private:
  size_t place_;
  const ShowGradient& show_;
};

/// What those lead to, so that the engine runs whatever leads to them, and nothing else.
class Behind final : public torch::autograd::Node {
 public:
  Behind() { add_input_metadata(autograd::no_gradient()); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.is_sparse() ? tensor.to_dense() : tensor.detach();
  return plain.is_complex() ? at::view_as_real(plain.resolve_conj()) : plain;
}

/// All gradients in few numbers, so that no second set of them has to be kept: under a tight budget
/// there is no room for one. Numbers are added up, each with a sign and at a place that are
/// formulas of where it stands (a count sketch): the norm of a difference of two is that of the
/// gradients' difference within some percent, and nothing is lost of what is alike in both.
class Sketch {
 public:
  /// \param numbers of all gradients: so many places tell enough, and take little time
  explicit Sketch(int64_t numbers) {
    const int64_t least = std::clamp<int64_t>(numbers, 1, 1 << 8);  // no more than there are
    places_ = std::clamp<int64_t>(numbers / 256, least, 1 << 20);
  }

  /// The gradient of a parameter, in any order of these.
  void add(size_t parameter, const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    tensor_ = parameter + 1;
    chunk_ = 0;
    kinds_.emplace(gradient.scalar_type(), at::empty({0}, gradient.options().layout(at::kStrided)));
    const at::Tensor numbers = dense(gradient);
    const auto norm = at::linalg_vector_norm(numbers, 2, /*dim=*/at::OptionalIntArrayRef(),
                                             /*keepdim=*/false, at::kDouble);
    // Of all together: gradients that cancel in a whole parameter are rounding and nothing else.
    size = std::hypot(size, norm.item<double>());
    add(numbers);
  }

  /// Behind backward, which autocast is off in: it coarsens what forward has computed.
  void end() {
    for (const auto& [type, like] : kinds_) rounding = std::max(rounding, rounding_of(like));
    signs_ = at::Tensor();
  }

  /// From the sum of the others.
  double distance(const std::vector<const Sketch*>& others) const {
    if (!sums_.defined()) return 0;
    at::Tensor apart = sums_.clone();
    for (const Sketch* other : others) {
      if (other->sums_.defined()) apart.sub_(other->sums_.to(apart.device()));
    }
    return apart.norm().item<double>();
  }

  double size = 0;
  double rounding = 0;

 private:
  /// In logical order, in parts that only the shape decides on: other kernels give other strides.
  void add(const at::Tensor& numbers) {
    if (numbers.numel() <= places_) return add_chunk(numbers.reshape({-1}));
    const int64_t each = numbers.numel() / numbers.size(0);
    if (each > places_) {
      for (const at::Tensor& part : numbers.unbind(0)) add(part);
    } else {
      for (const at::Tensor& part : numbers.split(places_ / each)) add_chunk(part.reshape({-1}));
    }
  }

  void add_chunk(const at::Tensor& numbers) {
    if (!signs_.defined()) {
      const auto options = numbers.options().dtype(at::kDouble);
      sums_ = at::zeros({places_}, options);
      const at::Tensor places = at::arange(1, places_ + 1, options);
      signs_ = places.mul(places).mul(0.7548776662).add(places.mul(0.5698402910)).sin().sign();
    }
    const uint64_t mixed = mix((tensor_ << 40U) + chunk_++);
    const int64_t count = numbers.numel();
    const auto begin = static_cast<int64_t>(mixed % static_cast<uint64_t>(places_));
    const double sign = (mixed >> 32U) % 2 == 0 ? 1 : -1;
    const at::Tensor signed_numbers = numbers.to(sums_.options()) * signs_.narrow(0, 0, count);
    const int64_t first = std::min(count, places_ - begin);
    sums_.narrow(0, begin, first).add_(signed_numbers.narrow(0, 0, first), sign);
    if (first == count) return;
    sums_.narrow(0, 0, count - first).add_(signed_numbers.narrow(0, first, count - first), sign);
  }

  /// SplitMix64.
  static uint64_t mix(uint64_t number) {
    number += 0x9e3779b97f4a7c15;
    number = (number ^ (number >> 30U)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27U)) * 0x94d049bb133111eb;
    return number ^ (number >> 31U);
  }

  int64_t places_;
  at::Tensor sums_;
  at::Tensor signs_;
  std::map<at::ScalarType, at::Tensor> kinds_;  // of gradients
  uint64_t tensor_ = 0;
  uint64_t chunk_ = 0;
};

}  // namespace

std::optional<std::string> GradientLook::find(const Batch& inputs, int64_t rows,
                                              const std::vector<int64_t>& dims) const {
  const int64_t half = rows / 2;
  const auto of = [&](Rows part, uint32_t rounded = 0) -> std::optional<Sketch> {
    Sketch sketch(numbers);
    std::mutex mutex;  // the engine may run several device threads
    const auto show = [&](size_t parameter, const at::Tensor& gradient) {
      const std::lock_guard<std::mutex> lock(mutex);
      sketch.add(parameter, gradient);
    };
    if (!run(infinitybatch::rows(inputs, part.begin, part.end), part, dims, show, rounded)) {
      return std::nullopt;
    }
    sketch.end();
    return sketch;
  };
  const auto whole = of({0, rows});
  if (!whole) return std::nullopt;
  const auto first = of({0, half});
  const auto second = first ? of({half, rows}) : std::nullopt;
  if (!second) return std::nullopt;
  const double apart = whole->distance({&*first, &*second});
  if (!std::isfinite(apart) || !std::isfinite(whole->size)) return std::nullopt;
  if (apart <= whole->rounding * whole->size) return std::nullopt;
  const auto moved = of({0, rows}, /*rounded=*/1);
  if (!moved) return std::nullopt;
  const double noisy = is_coarse(whole->rounding) ? 1 : 64;  // times what another rounding moves
  if (apart <= noisy * moved->distance({&*whole})) return std::nullopt;
  std::ostringstream text;
  text << "the gradient of samples 0 to " << rows - 1 << " is not the sum of those of its halves";
  if (whole->size > 0) text << " (by " << apart / whole->size << " relative)";
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

void show_gradients(const std::vector<NamedParameter>& parameters, const at::Tensor& number,
                    const ShowGradient& show) {
  using torch::autograd::Edge;
  const auto behind = compat::make_node<Behind>();
  std::map<const torch::autograd::Node*, compat::NodePtr> ends;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    if (!tensor.requires_grad() || !tensor.is_leaf() || autograd::has_hooks(tensor)) continue;
    compat::NodePtr& shown = ends[torch::autograd::impl::gradient_edge(tensor).function.get()];
    if (shown) continue;  // tied
    shown = compat::make_node<Shown>(tensor, i, show);
    shown->add_next_edge(Edge(behind, 0));
  }
  bool any = false;
  autograd::walk_graph({number}, [&](torch::autograd::Node& node) {
    for (Edge& edge : node.next_edges()) {
      const auto found = edge.function ? ends.find(edge.function.get()) : ends.end();
      if (found == ends.end()) continue;
      edge = Edge(found->second, 0);
      any = true;
    }
  });
  if (any) autograd::gradients_at(number, {Edge(behind, 0)}, /*keep=*/false);
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
