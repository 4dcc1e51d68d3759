#pragma once

#include "coupled/draw_laws.hpp"
#include "tape/op_facts.hpp"

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace infinitybatch::coupled {

/// What a drawing op makes of its numbers.
enum class DrawKind {
  numbers,          ///< gives them; they do not depend on values of its arguments
  by_values,        ///< gives them; they do
  by_values_alone,  ///< the same, with gradients that depend on them
  dropout,          ///< multiplies by a mask as large as its argument
  feature_dropout,  ///< by one for each sample and channel
  alpha_dropout,
  feature_alpha_dropout,
  rrelu,
  attention,  ///< draws inside, batch first
};

struct DrawOp {
  std::string_view name;
  DrawKind kind;
  bool in_pieces;  ///< on the CPU, pieces drawn one after the other are the whole, bit for bit
  /// Numbers are drawn in the order of dimensions, however the argument lies in memory.
  bool in_order = false;
};

/// Null where nothing is known of it.
const DrawOp* draw_op(const tape::OpFacts& facts);

inline bool draws_features(DrawKind kind) {
  return kind == DrawKind::feature_dropout || kind == DrawKind::feature_alpha_dropout;
}
inline bool is_dropout(DrawKind kind) {
  return kind == DrawKind::dropout || kind == DrawKind::alpha_dropout || draws_features(kind);
}
/// Whether the argument passes through it, changed by the numbers.
inline bool passes_through(DrawKind kind) {
  return is_dropout(kind) || kind == DrawKind::rrelu;
}

/// Sizes and strides of an argument.
struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

/// Of a tensor, or of an argument named "size"; nothing where it is neither.
std::optional<Shape> shape_of(const tape::OpFacts& facts, size_t argument,
                              const c10::IValue& value);

/// The generator that an op is given.
std::optional<at::Generator> generator_of(c10::ArrayRef<c10::IValue> arguments);

/// `axis` for a tensor in which the dimension holds `each` elements for each sample.
/// Nothing where that cannot be told.
std::optional<BatchAxis> axis_for(const BatchAxis& axis, int64_t each);

/// Dimensions of a shape of `rows` samples, from the outermost in memory to the innermost.
std::vector<int64_t> order_of(const Shape& shape, const BatchAxis& axis, int64_t rows);

/// `shape` with `rows` samples in place of `here`; dense, in the same order in memory.
Shape with_rows(const Shape& shape, const BatchAxis& axis, int64_t here, int64_t rows);

/// Whether samples lie one after the other in memory.
bool outermost(const Shape& shape, const BatchAxis& axis, int64_t rows);

/// The rows [begin, end) of a tensor with `all` samples.
at::Tensor rows_of(const at::Tensor& whole, const BatchAxis& axis, int64_t all, int64_t begin,
                   int64_t end);
/// Micro-batches of a tensor, put together.
at::Tensor join(const std::vector<at::Tensor>& parts, const BatchAxis& axis,
                const std::vector<int64_t>& rows);

}  // namespace infinitybatch::coupled
