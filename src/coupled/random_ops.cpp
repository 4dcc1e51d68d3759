#include "coupled/random_ops.hpp"

#include "core/memory_order.hpp"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace infinitybatch::coupled {
namespace {

// `in_pieces` was measured, with ragged pieces, in fp64, fp32 and bf16 (torch 2.13): normal numbers
// alone are filled in blocks of 16, so that they depend on where pieces end. `in_order` is whether
// the kernel makes its result, or its noise, contiguous, whatever it is given.
constexpr std::array kOps{
    DrawOp{"aten::dropout", DrawKind::dropout, true},
    DrawOp{"aten::dropout_", DrawKind::dropout, true},
    DrawOp{"aten::feature_dropout", DrawKind::feature_dropout, true},
    DrawOp{"aten::feature_dropout_", DrawKind::feature_dropout, true},
    DrawOp{"aten::alpha_dropout", DrawKind::alpha_dropout, true},
    DrawOp{"aten::alpha_dropout_", DrawKind::alpha_dropout, true},
    DrawOp{"aten::feature_alpha_dropout", DrawKind::feature_alpha_dropout, true},
    DrawOp{"aten::feature_alpha_dropout_", DrawKind::feature_alpha_dropout, true},
    DrawOp{"aten::rrelu", DrawKind::rrelu, true, true},
    DrawOp{"aten::rrelu_", DrawKind::rrelu, true, true},
    DrawOp{"aten::scaled_dot_product_attention", DrawKind::attention, true},
    DrawOp{"aten::rand", DrawKind::numbers, true},
    DrawOp{"aten::rand_like", DrawKind::numbers, true},
    DrawOp{"aten::randn", DrawKind::numbers, false},
    DrawOp{"aten::randn_like", DrawKind::numbers, false},
    DrawOp{"aten::randint", DrawKind::numbers, true},
    DrawOp{"aten::randint_like", DrawKind::numbers, true},
    DrawOp{"aten::uniform_", DrawKind::numbers, true},
    DrawOp{"aten::normal_", DrawKind::numbers, false},
    DrawOp{"aten::random_", DrawKind::numbers, true},
    DrawOp{"aten::exponential_", DrawKind::numbers, true},
    DrawOp{"aten::geometric_", DrawKind::numbers, true},
    DrawOp{"aten::cauchy_", DrawKind::numbers, true},
    DrawOp{"aten::log_normal_", DrawKind::numbers, true},
    DrawOp{"aten::bernoulli", DrawKind::by_values, true, true},
    DrawOp{"aten::bernoulli_", DrawKind::by_values, true},
    DrawOp{"aten::normal", DrawKind::by_values, false, true},
    DrawOp{"aten::multinomial", DrawKind::by_values, true, true},
    DrawOp{"aten::poisson", DrawKind::by_values, true, true},
    DrawOp{"aten::binomial", DrawKind::by_values, true, true},
    DrawOp{"aten::_standard_gamma", DrawKind::by_values_alone, true, true},
    DrawOp{"aten::_sample_dirichlet", DrawKind::by_values_alone, true, true},
};

std::vector<int64_t> contiguous(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(1, sizes[d]);
  }
  return strides;
}

}  // namespace

const DrawOp* draw_op(const tape::OpFacts& facts) {
  const auto found = std::find_if(kOps.begin(), kOps.end(),
                                  [&](const DrawOp& op) { return op.name == facts.name(); });
  return found == kOps.end() ? nullptr : &*found;
}

std::optional<Shape> shape_of(const tape::OpFacts& facts, size_t argument,
                              const c10::IValue& value) {
  Shape shape;
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return std::nullopt;
    shape.sizes = tensor.sizes().vec();
    shape.strides = tensor.strides().vec();
    return shape;
  }
  const auto& schema = facts.handle.schema().arguments()[argument];
  if (schema.name() != "size" || !value.isIntList()) return std::nullopt;
  shape.sizes = value.toIntVector();
  shape.strides = contiguous(shape.sizes);
  return shape;
}

std::optional<at::Generator> generator_of(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isGenerator()) return argument.toGenerator();
  }
  return std::nullopt;
}

std::optional<BatchAxis> axis_for(const BatchAxis& axis, int64_t each) {
  BatchAxis here = axis;
  if (axis.outer * axis.inner == each) return here;
  // Another length of what lies beside the samples.
  if (axis.outer == 1 && axis.inner > 1) {
    here.inner = each;
  } else if (axis.inner == 1 && axis.outer > 1) {
    here.outer = each;
  } else {
    return std::nullopt;
  }
  return here;
}

Shape with_rows(const Shape& shape, const BatchAxis& axis, int64_t here, int64_t rows) {
  Shape whole = shape;
  if (axis.dim >= 0) whole.sizes[static_cast<size_t>(axis.dim)] = axis.outer * axis.inner * rows;
  int64_t step = 1;
  const std::vector<int64_t> order = order_of(shape, axis, here);
  for (size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    whole.strides[d] = step;
    step *= std::max<int64_t>(1, whole.sizes[d]);
  }
  return whole;
}

std::vector<int64_t> order_of(const Shape& shape, const BatchAxis& axis, int64_t rows) {
  std::vector<int64_t> order = memory_order(shape.sizes, shape.strides);
  // A single sample's stride says nothing.
  if (axis.dim < 0 || rows > 1) return order;
  order.erase(std::find(order.begin(), order.end(), axis.dim));
  auto place = order.begin();
  for (auto d = order.begin(); d != order.end(); ++d) {
    const auto dim = static_cast<size_t>(*d);
    if (shape.sizes[dim] != 1 && axis.outside[dim]) place = std::next(d);
  }
  order.insert(place, axis.dim);
  return order;
}

bool outermost(const Shape& shape, const BatchAxis& axis, int64_t rows) {
  if (axis.outer > 1) return false;
  for (const int64_t d : order_of(shape, axis, rows)) {
    if (d == axis.dim) return true;
    if (shape.sizes[static_cast<size_t>(d)] != 1) return false;
  }
  return true;
}

at::Tensor rows_of(const at::Tensor& whole, const BatchAxis& axis, int64_t all, int64_t begin,
                   int64_t end) {
  if (axis.dim < 0) return whole;
  if (axis.outer == 1) {
    return whole.narrow(axis.dim, begin * axis.inner, (end - begin) * axis.inner);
  }
  return whole.unflatten(axis.dim, {axis.outer, all, axis.inner})
      .narrow(axis.dim + 1, begin, end - begin)
      .flatten(axis.dim, axis.dim + 2);
}

at::Tensor join(const std::vector<at::Tensor>& parts, const BatchAxis& axis,
                const std::vector<int64_t>& rows) {
  if (axis.dim < 0) return parts.front();
  if (axis.outer == 1) return at::cat(parts, axis.dim);
  std::vector<at::Tensor> apart;
  for (size_t i = 0; i < parts.size(); ++i) {
    apart.push_back(parts[i].unflatten(axis.dim, {axis.outer, rows[i], axis.inner}));
  }
  return at::cat(apart, axis.dim + 1).flatten(axis.dim, axis.dim + 2);
}

}  // namespace infinitybatch::coupled
