#include "coupled/random_draw.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace infinitybatch::coupled {
namespace {

bool on_cpu(const WholeBatchOp::Arguments& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice() && !argument.toDevice().is_cpu()) return false;
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_cpu()) {
      return false;
    }
  }
  return true;
}

/// The memory format of a result is asked for by name, and is not that of the argument.
bool names_format(const tape::OpFacts& facts, const WholeBatchOp::Arguments& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool format = facts.handle.schema().arguments()[i].name() == "memory_format";
    if (!format || !arguments[i].isInt()) continue;
    return static_cast<c10::MemoryFormat>(arguments[i].toInt()) != c10::MemoryFormat::Preserve;
  }
  return false;
}

bool only_ones_before(const Shape& shape, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (shape.sizes[static_cast<size_t>(d)] != 1) return false;
  }
  return true;
}

}  // namespace

RandomDraw::RandomDraw(const tape::OpFacts& facts, const DrawLaw* law,
                       std::optional<at::Generator> given, std::shared_ptr<RandomStreams> streams)
    : facts_(facts),
      op_(*draw_op(facts)),
      law_(law == nullptr ? std::nullopt : std::optional(*law)),
      given_(std::move(given)),
      streams_(std::move(streams)),
      stream_(streams_->which(given_)),
      in_place_(!facts.written.empty() && facts.written.front()) {}

void RandomDraw::refuse(const std::string& why) const {
  throw CouplingError(facts_.name(), facts_.name() +
                                         " draws random numbers, and match_native_rng does not "
                                         "know those of the whole batch: " +
                                         why);
}

void RandomDraw::check_shape(uint16_t argument, const Shape& shape, Rows rows) {
  const BatchAxis& axis = law_->axes.at(argument);
  BatchAxis here = axis;
  if (axis.dim >= 0) {
    const int64_t size = shape.sizes.at(static_cast<size_t>(axis.dim));
    const auto found = size % rows.size() == 0 ? axis_for(axis, size / rows.size()) : std::nullopt;
    if (!found) {
      refuse("it runs on shape " + c10::str(shape.sizes) + " for " + std::to_string(rows.size()) +
             " samples, in which dimension " + std::to_string(axis.dim) +
             " should hold equally much of each");
    }
    here = *found;
  }
  if (parts_.empty()) {
    axes_[argument] = here;
    shapes_[argument] = shape;
    return;
  }
  const Shape& first = shapes_.at(argument);
  const BatchAxis& known = axes_.at(argument);
  bool same = first.sizes.size() == shape.sizes.size() && known.outer == here.outer &&
              known.inner == here.inner;
  for (size_t d = 0; same && d < shape.sizes.size(); ++d) {
    same = static_cast<int64_t>(d) == axis.dim || first.sizes[d] == shape.sizes[d];
  }
  if (!same) {
    refuse("it runs on shape " + c10::str(first.sizes) + " for some samples and " +
           c10::str(shape.sizes) + " for others; pad samples to one length");
  }
}

BatchAxis RandomDraw::drawn_axis() const {
  BatchAxis axis;
  int64_t dims = 0;
  int64_t behind = -1;  // dimensions from the batch to the end
  for (const auto& [argument, each] : axes_) {
    const auto count = static_cast<int64_t>(shapes_.at(argument).sizes.size());
    dims = std::max(dims, count);
    if (each.dim < 0) continue;
    if (behind < 0) {
      axis = each;
      behind = count - each.dim;
    } else if (op_.kind != DrawKind::attention && behind != count - each.dim) {
      refuse("its arguments hold the samples in different dimensions");
    }
  }
  if (behind < 0) return axis;
  if (draws_features(op_.kind)) {
    // One number for each sample and channel: what lies behind them shares it.
    if (axis.dim > 1) axis = BatchAxis();
    return axis;
  }
  axis.dim = dims - behind;
  return axis;
}

/// Whether nothing varies slower in the result than the samples do.
bool RandomDraw::comes_first(const BatchAxis& drawn) const {
  if (drawn.outer > 1) return false;
  size_t dims = 0;
  for (const auto& [argument, shape] : shapes_) dims = std::max(dims, shape.sizes.size());
  for (const auto& [argument, shape] : shapes_) {
    const auto ahead = static_cast<int64_t>(dims - shape.sizes.size());
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      if (ahead + static_cast<int64_t>(d) < drawn.dim && shape.sizes[d] != 1) return false;
    }
  }
  return true;
}

RandomDraw::Mode RandomDraw::mode_for(const Arguments& arguments, Rows rows) const {
  if (!law_) return Mode::pieces;
  const BatchAxis drawn = drawn_axis();
  if (drawn.dim < 0) return Mode::shared;
  const auto leading = [&] {
    for (const auto& [argument, axis] : axes_) {
      if (axis.dim >= 0) return std::pair(shape_of(facts_, argument, arguments[argument]), axis);
    }
    return std::pair(std::optional<Shape>(), BatchAxis());
  }();
  const Shape& shape = *leading.first;
  const BatchAxis& axis = leading.second;
  const bool first = only_ones_before(shape, axis.dim) && axis.outer == 1;
  const std::string_view name = facts_.name();
  const bool distributions = name == "aten::multinomial" || name == "aten::_sample_dirichlet";
  if (distributions && axis.dim + 1 == static_cast<int64_t>(shape.sizes.size())) {
    refuse("it draws among the samples of a batch");
  }
  bool lines_up = first;
  if (op_.kind == DrawKind::attention) {
    lines_up = axis.dim == 0 && axis.outer == 1;
  } else if (op_.in_order) {
    lines_up = comes_first(drawn);
  } else if (!draws_features(op_.kind) && !names_format(facts_, arguments)) {
    lines_up = outermost(shape, axis, rows.size());
  }
  if (op_.in_pieces && lines_up && on_cpu(arguments)) return Mode::pieces;
  if (op_.kind == DrawKind::attention) {
    refuse(
        "it is one op with its dropout, which is known only on the CPU and with the batch first; "
        "write attention as matmul, softmax, dropout, matmul");
  }
  if (op_.kind == DrawKind::by_values_alone) {
    refuse(
        "its gradient needs them too, which is known only on the CPU and with the batch first; "
        "give it the samples in the first dimension");
  }
  return Mode::whole;
}

void RandomDraw::collect(Rows rows, const Arguments& arguments) {
  if (law_) {
    for (const auto& [argument, axis] : law_->axes) {
      const auto shape = shape_of(facts_, argument, arguments[argument]);
      if (!shape || (axis.dim >= 0 && shape->sizes.size() != axis.outside.size())) {
        refuse("it is given other arguments than in the first recording");
      }
      check_shape(argument, *shape, rows);
    }
  }
  const Mode mode = mode_for(arguments, rows);
  if (mode_ == Mode::unknown) {
    mode_ = mode;
    first_rows_ = rows.size();
    template_ = arguments;
    for (const auto& [argument, axis] : axes_) {
      if (!arguments[argument].isTensor()) continue;
      options_[argument] = arguments[argument].toTensor().options();
      if (axis.dim >= 0) template_[argument] = c10::IValue();
    }
    if (!law_) template_.clear();
  } else if (mode != mode_) {
    refuse("micro-batches lie in memory in different ways");
  }
  Part& part = parts_[rows.begin];
  part.rows = rows;
  rows_ += rows.size();
  const bool by_values = op_.kind == DrawKind::by_values || op_.kind == DrawKind::rrelu;
  if (mode_ != Mode::whole || !by_values) return;
  for (const auto& [argument, axis] : axes_) {
    if (axis.dim < 0 || !arguments[argument].isTensor()) continue;
    part.inputs[argument] = arguments[argument].toTensor().detach();
  }
}

void RandomDraw::combine(SettledBuffers& /*buffers*/) {
  const RandomStreams::Position& start = streams_->position(stream_);
  if (mode_ == Mode::shared) {
    for (auto& [begin, part] : parts_) part.start = start;
  } else if (mode_ == Mode::pieces) {
    parts_.begin()->second.start = start;
  } else {
    const at::NoGradGuard no_grad;
    streams_->move(stream_,
                   streams_->draw(stream_, given_, start, [&] { numbers_ = draw_whole(); }));
    for (auto& [begin, part] : parts_) part.inputs.clear();
  }
}

RandomDraw::Arguments RandomDraw::whole_arguments() const {
  Arguments whole = template_;
  for (const auto& [argument, axis] : axes_) {
    if (axis.dim < 0) continue;
    const Shape shape = with_rows(shapes_.at(argument), axis, first_rows_, rows_);
    const auto options = options_.find(argument);
    if (options == options_.end()) {
      whole[argument] = shape.sizes;
      continue;
    }
    at::Tensor tensor = at::empty_strided(shape.sizes, shape.strides, options->second);
    if (!parts_.begin()->second.inputs.empty()) {
      std::vector<at::Tensor> inputs;
      std::vector<int64_t> rows;
      for (const auto& [begin, part] : parts_) {
        inputs.push_back(part.inputs.at(argument));
        rows.push_back(part.rows.size());
      }
      tensor.copy_(join(inputs, axis, rows));
    }
    whole[argument] = std::move(tensor);
  }
  return whole;
}

at::Tensor RandomDraw::run(const Arguments& arguments) const {
  Arguments stack = arguments;
  facts_.handle.callBoxed(stack);
  return stack.front().toTensor();
}

at::Tensor RandomDraw::draw_whole() const {
  if (is_dropout(op_.kind)) return draw_mask();
  const Arguments whole = whole_arguments();
  if (op_.kind != DrawKind::rrelu) return run(whole);
  const at::Tensor input = whole[0].toTensor();
  // The kernel fills it in the order of dimensions.
  at::Tensor noise = at::empty_like(input, at::MemoryFormat::Contiguous);
  at::rrelu_with_noise(input, noise, whole[1].toScalar(), whole[2].toScalar(), /*training=*/true,
                       given_);
  return noise;
}

/// What is kept, as bools: an eighth of the memory.
at::Tensor RandomDraw::draw_mask() const {
  const double keep = 1 - template_[1].toDouble();
  const Shape shape = with_rows(shapes_.at(0), axes_.at(0), first_rows_, rows_);
  const at::TensorOptions& options = options_.at(0);
  if (draws_features(op_.kind)) {
    std::vector<int64_t> sizes(shape.sizes.size(), 1);
    for (size_t d = 0; d < std::min<size_t>(2, sizes.size()); ++d) sizes[d] = shape.sizes[d];
    return at::empty(sizes, options).bernoulli_(keep, given_).ne(0);
  }
  at::Tensor whole = at::empty_strided(shape.sizes, shape.strides, options);
  if (op_.kind == DrawKind::dropout && !whole.is_cpu()) {
    // Fused there, with numbers of its own.
    const at::Tensor ones = whole.fill_(1);
    return (in_place_ ? at::dropout_(whole, 1 - keep, /*train=*/true)
                      : at::dropout(ones, 1 - keep, /*train=*/true))
        .ne(0);
  }
  return whole.bernoulli_(keep, given_).ne(0);
}

at::Tensor RandomDraw::apply_mask(const at::Tensor& input, const Arguments& arguments,
                                  Rows rows) const {
  const int64_t begin = rows.begin - parts_.begin()->first;
  const at::Tensor mine = rows_of(numbers_, drawn_axis(), rows_, begin, begin + rows.size());
  at::Tensor input_here = input;
  const auto times = [&](const at::Tensor& noise) {
    return in_place_ ? input_here.mul_(noise) : input.mul(noise);
  };
  if (op_.kind == DrawKind::rrelu) return times(mine.clone());
  // As torch's own _dropout computes it, in the input's type.
  const double p = arguments[1].toDouble();
  at::Tensor noise = mine.to(input.scalar_type());
  if (op_.kind == DrawKind::dropout || op_.kind == DrawKind::feature_dropout) {
    noise.div_(1 - p);
    return times(noise);
  }
  constexpr double kAlpha = 1.7580993408473766;
  const double a = 1.0 / std::sqrt((kAlpha * kAlpha * p + 1) * (1 - p));
  const at::Tensor shift = noise.add(-1).mul_(kAlpha * a).add_(kAlpha * a * p);
  noise.mul_(a);
  return in_place_ ? input_here.mul_(noise).add_(shift) : times(noise).add_(shift);
}

at::Tensor RandomDraw::give_numbers(const Arguments& arguments, const at::Tensor& numbers) const {
  bool differentiable = false;
  for (const c10::IValue& argument : arguments) {
    differentiable = differentiable || (argument.isTensor() && argument.toTensor().defined() &&
                                        argument.toTensor().requires_grad());
  }
  differentiable = differentiable && c10::GradMode::is_enabled();
  // Forward may change them in place.
  if (!differentiable && !in_place_) return numbers.clone();
  at::Tensor result;
  if (differentiable) {
    // For the graph that the op has, whose gradients are zeros.
    streams_->draw(stream_, generator_of(arguments), streams_->position(stream_),
                   [&] { result = run(arguments); });
  } else {
    result = arguments.front().toTensor();
  }
  const at::NoGradGuard no_grad;
  result.detach().copy_(numbers);
  return result;
}

at::Tensor RandomDraw::apply(Rows rows, const Arguments& arguments,
                             std::vector<at::Tensor>& /*leaves*/) {
  if (mode_ == Mode::whole) {
    if (passes_through(op_.kind)) return apply_mask(arguments.front().toTensor(), arguments, rows);
    const int64_t begin = rows.begin - parts_.begin()->first;
    return give_numbers(arguments,
                        rows_of(numbers_, drawn_axis(), rows_, begin, begin + rows.size()));
  }
  const auto here = parts_.find(rows.begin);
  if (!here->second.start) {
    throw StateError(facts_.name() + " was asked for the numbers of rows from " +
                     std::to_string(rows.begin) + " before those in front of them");
  }
  at::Tensor result;
  RandomStreams::Position after = streams_->draw(
      stream_, generator_of(arguments), *here->second.start, [&] { result = run(arguments); });
  const auto next = std::next(here);
  if (mode_ == Mode::pieces && next != parts_.end()) {
    if (!next->second.start) next->second.start = std::move(after);
  } else if (!moved_) {
    moved_ = true;
    streams_->move(stream_, std::move(after));
  }
  return result;
}

void RandomDraw::combine_gradients(autograd::GradientSinks& /*sinks*/) {
  if (keep_) return;
  numbers_.reset();
  for (auto& [begin, part] : parts_) part.start.reset();
}

}  // namespace infinitybatch::coupled
