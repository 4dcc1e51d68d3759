// How what drawing ops are given follows the samples.
#include "core/memory_order.hpp"
#include "coupled/random_draw.hpp"
#include "tape/arguments.hpp"
#include "tape/segment.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

namespace infinitybatch::coupled {
namespace {

[[noreturn]] void refuse(const std::string& op, const std::string& why) {
  throw CouplingError(op, op +
                              " draws random numbers, and match_native_rng does not know those of "
                              "the whole batch: " +
                              why + "; or leave match_native_rng out");
}

/// What an op that draws is given, but for tensors' values.
struct Given {
  std::string op;
  std::map<uint16_t, Shape> shapes;
  std::vector<int64_t> numbers;
};

bool keeps_layout(const tape::Op& op) {
  return op.facts != nullptr && op.facts->name() == "aten::empty_like";
}

/// Plays a tape in which samples stay apart: ops that mix them are replaced by ones that do not.
class Walk {
 public:
  using Visit = std::function<void(size_t draw, const tape::Op& op,
                                   const std::vector<c10::IValue>& arguments)>;

  Walk(const tape::Tape& tape, const Batch& inputs) : tape_(tape), inputs_(inputs) {}

  void run(const Visit& visit) const {
    const at::NoGradGuard no_grad;
    std::vector<tape::Cut> cuts;
    for (uint32_t i = 0; i < tape_.ops.size(); ++i) {
      const tape::Op& op = tape_.ops[i];
      if (is_whole_batch_op(tape_, op) || keeps_layout(op)) {
        cuts.push_back({i, !draws_for_all(tape_, op) && !keeps_layout(op)});
      }
    }
    const std::vector<tape::Segment> segments = tape::cut(tape_, cuts);
    std::vector<at::Tensor> values(tape_.value_count);
    for (const tape::External& external : tape_.externals) {
      if (external.before.defined()) values[external.value] = external.before.clone();
    }
    std::vector<tape::Draw> random = tape_.initial;
    size_t draw = 0;
    for (size_t s = 0; s < segments.size(); ++s) {
      tape::StandIn first;
      if (s > 0) {
        const tape::Op& op = tape_.ops[segments[s].ops.begin];
        first = [&, op](std::vector<c10::IValue>& arguments) {
          if (draws_for_all(tape_, op)) visit(draw++, op, arguments);
          return stand_in_for(op, arguments);
        };
      }
      tape::play(tape_, segments[s], inputs_, values, random, first);
      // Nobody asks for the graph.
      for (at::Tensor& value : values) {
        if (value.defined() && value.grad_fn()) value = value.detach();
      }
    }
  }

 private:
  static at::Tensor stand_in_for(const tape::Op& op, std::vector<c10::IValue>& arguments) {
    if (keeps_layout(op)) return filled_like(arguments);
    if (const DrawOp* known = draw_op(*op.facts); known != nullptr && passes_through(known->kind)) {
      const at::Tensor input = arguments[0].toTensor();
      return op.facts->written[0] ? input : input.clone();
    }
    if (op.facts->name() == "aten::batch_norm") return normalise(arguments);
    op.facts->handle.callBoxed(arguments);
    return arguments.front().toTensor();
  }

  /// What `empty_like` gives, without what happens to lie in memory.
  static at::Tensor filled_like(const std::vector<c10::IValue>& arguments) {
    const at::Tensor like = arguments[0].toTensor();
    std::vector<c10::IValue> stack = arguments;
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::zeros_like", "");
    op.callBoxed(stack);
    at::Tensor filled = stack.front().toTensor();
    return filled.copy_(like);
  }

  /// By statistics that do not come from the batch.
  static at::Tensor normalise(const std::vector<c10::IValue>& arguments) {
    const at::Tensor input = arguments[0].toTensor();
    const auto type = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto options = input.options().dtype(type);
    const auto tensor = [](const c10::IValue& value) {
      return value.isTensor() ? value.toTensor() : at::Tensor();
    };
    return at::batch_norm(input, tensor(arguments[1]), tensor(arguments[2]),
                          at::zeros({input.size(1)}, options), at::ones({input.size(1)}, options),
                          /*training=*/false, /*momentum=*/0.0, /*eps=*/1e-5,
                          /*cudnn_enabled=*/false);
  }

  const tape::Tape& tape_;
  const Batch& inputs_;
};

std::vector<Given> look_at(const DrawExample& example) {
  std::vector<Given> all;
  Walk(example.tape, example.inputs)
      .run([&](size_t, const tape::Op& op, const std::vector<c10::IValue>& arguments) {
        Given given;
        given.op = op.facts->name();
        for (size_t i = 0; i < arguments.size(); ++i) {
          const auto argument = static_cast<uint16_t>(i);
          if (auto shape = shape_of(*op.facts, i, arguments[i])) {
            given.shapes[argument] = std::move(*shape);
          } else if (arguments[i].isInt()) {
            given.numbers.push_back(arguments[i].toInt());
          }
        }
        all.push_back(std::move(given));
      });
  return all;
}

/// The same inputs with another first sample.
Batch with_another_sample(const DrawExample& example) {
  const at::NoGradGuard no_grad;
  std::vector<Leaf> leaves = example.inputs.leaves();
  for (Leaf& leaf : leaves) {
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    leaf.tensor = leaf.tensor.detach().clone();
    at::Tensor first = leaf.tensor.narrow(leaf.batch_dim, 0, 1);
    if (leaf.tensor.is_floating_point() || leaf.tensor.is_complex()) {
      first.mul_(0.5).add_(0.3);
    } else {
      first.copy_(leaf.tensor.narrow(leaf.batch_dim, example.rows - 1, 1));
    }
  }
  return {std::move(leaves), example.inputs.structure()};
}

at::Tensor changes(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor changed = a.ne(b);
  if (a.is_floating_point())
    changed = changed.logical_and(a.isnan().logical_and(b.isnan()).logical_not());
  return changed;
}

/// Whether what changed lies in the first of `rows` samples alone, seen as (outer, rows, inner).
bool lies_in_first(const at::Tensor& changed, int64_t dim, int64_t outer, int64_t rows,
                   int64_t inner) {
  const at::Tensor apart = changed.unflatten(dim, {outer, rows, inner}).movedim(dim + 1, 0);
  return apart.narrow(0, 1, rows - 1).any().logical_not().item<bool>();
}

/// Finds `outer` and `inner` of the dimensions that hold more than one element for each sample.
void locate(const DrawExample& example, DrawLaws& laws,
            const std::set<std::pair<size_t, uint16_t>>& wanted) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<size_t, uint16_t>, at::Tensor> before;
  const auto visit_wanted = [&](size_t draw, const std::vector<c10::IValue>& arguments,
                                const auto& act) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::pair<size_t, uint16_t> key{draw, static_cast<uint16_t>(i)};
      if (wanted.contains(key) && arguments[i].isTensor()) act(key, arguments[i].toTensor());
    }
  };
  Walk(example.tape, example.inputs)
      .run([&](size_t draw, const tape::Op&, const std::vector<c10::IValue>& arguments) {
        visit_wanted(draw, arguments, [&](const auto& key, const at::Tensor& tensor) {
          before[key] = tensor.detach().clone();
        });
      });
  std::map<std::pair<size_t, uint16_t>, at::Tensor> changed;
  const Batch other = with_another_sample(example);
  Walk(example.tape, other)
      .run([&](size_t draw, const tape::Op&, const std::vector<c10::IValue>& arguments) {
        visit_wanted(draw, arguments, [&](const auto& key, const at::Tensor& tensor) {
          changed[key] = changes(before.at(key), tensor.detach());
        });
      });
  for (const auto& key : wanted) {
    DrawLaw& law = laws.laws[key.first];
    BatchAxis& axis = law.axes.at(key.second);
    const int64_t each = axis.inner;
    const std::string where = "dimension " + std::to_string(axis.dim) +
                              " of what it is given holds " + std::to_string(each) +
                              " elements for each sample";
    const auto found = changed.find(key);
    std::vector<BatchAxis> fitting;
    if (found != changed.end() && found->second.any().item<bool>()) {
      for (int64_t outer = 1; outer <= each; ++outer) {
        if (each % outer != 0) continue;
        if (!lies_in_first(found->second, axis.dim, outer, example.rows, each / outer)) continue;
        fitting.push_back(axis);
        fitting.back().outer = outer;
        fitting.back().inner = each / outer;
      }
    }
    if (fitting.size() != 1) {
      refuse(law.op,
             where + ", and it cannot be seen where those of one sample lie" +
                 (fitting.empty() && found != changed.end() && found->second.any().item<bool>()
                      ? " (each depends on more than one sample)"
                      : "") +
                 "; draw in a shape in which the batch is a dimension of its own, as "
                 "[batch, time, features], and flatten afterwards");
    }
    axis = fitting.front();
  }
}

BatchAxis axis_of(const std::string& op, const Shape& a, int64_t rows_a, const Shape& b,
                  int64_t rows_b) {
  const std::string shapes = c10::str(a.sizes) + " for " + std::to_string(rows_a) +
                             " samples and " + c10::str(b.sizes) + " for " + std::to_string(rows_b);
  if (a.sizes.size() != b.sizes.size()) refuse(op, "it runs on shape " + shapes);
  BatchAxis axis;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] == b.sizes[d]) continue;
    const bool follows = a.sizes[d] % rows_a == 0 && b.sizes[d] % rows_b == 0 &&
                         a.sizes[d] / rows_a == b.sizes[d] / rows_b;
    if (axis.dim >= 0 || !follows) {
      refuse(op, "it runs on shape " + shapes +
                     ", of which no single dimension holds equally much of each sample");
    }
    axis.dim = static_cast<int64_t>(d);
    axis.inner = a.sizes[d] / rows_a;
  }
  if (axis.dim < 0) return axis;
  const Shape& told = rows_a > rows_b ? a : b;
  axis.outside.resize(told.sizes.size(), false);
  for (const int64_t d : order_of(told, axis, std::max(rows_a, rows_b))) {
    if (d == axis.dim) break;
    axis.outside[static_cast<size_t>(d)] = told.sizes[static_cast<size_t>(d)] > 1;
  }
  return axis;
}

}  // namespace

std::vector<uint32_t> drawing_ops(const tape::Tape& tape) {
  std::vector<uint32_t> positions;
  for (uint32_t i = 0; i < tape.ops.size(); ++i) {
    if (draws_for_all(tape, tape.ops[i])) positions.push_back(i);
  }
  return positions;
}

bool DrawLaws::fit(const tape::Tape& tape) const {
  const std::vector<uint32_t> places = drawing_ops(tape);
  if (places.empty()) return true;
  return ops == tape.ops.size() && layouts == layouts_found(tape) &&
         std::equal(places.begin(), places.end(), laws.begin(), laws.end(),
                    [&](uint32_t place, const DrawLaw& law) {
                      return place == law.place && tape.ops[place].facts->name() == law.op;
                    });
}

void check_draws(const tape::Tape& tape) {
  for (const tape::Op& op : tape.ops) {
    // Of a single sample as well, for which it draws nothing.
    if (!tape.whole_draws || op.facts == nullptr || op.facts->name() != "aten::randperm") continue;
    refuse(op.facts->name(),
           "it permutes what other micro-batches hold too; permute the batch before the step");
  }
  for (const uint32_t position : drawing_ops(tape)) {
    const tape::Op& op = tape.ops[position];
    const std::string& name = op.facts->name();
    const auto& schema = op.facts->handle.schema().arguments();
    const bool into = std::any_of(schema.begin(), schema.end(),
                                  [](const c10::Argument& each) { return each.name() == "out"; });
    if (draw_op(*op.facts) == nullptr || into) {
      refuse(name, into ? "it writes them into a tensor that it is given (out=); let it return them"
                        : "it draws inside of a larger op (dropout between the layers of an LSTM, "
                          "say); set its dropout to 0 and apply dropout as an op of its own");
    }
  }
  if (tape.strayed && !tape.whole_draws) {
    throw CouplingError(
        "torch.manual_seed",
        "forward seeds a random generator, or an op that does not say so draws from it, so its "
        "parts, which run one by one where a layer sees the whole batch, would draw other numbers; "
        "seed before the step, or draw by ops of torch's own");
  }
  if (tape.strayed || (tape.seeds_own && tape.whole_draws)) {
    throw CouplingError(
        "torch.manual_seed",
        "forward seeds a random generator, or an op that does not say so draws from it, so "
        "match_native_rng does not know the numbers of the whole batch; seed before the step, or "
        "leave match_native_rng out");
  }
}

std::string layouts_found(const tape::Tape& tape) {
  std::string text;
  for (const tape::External& external : tape.externals) {
    if (external.input_leaf >= 0) continue;
    const std::string own = layout_of(external.tensor, /*dim=*/-1);
    if (!own.empty()) text += std::to_string(external.value) + " lies " + own + "|";
  }
  return text;
}

DrawLaws find_draw_laws(const DrawExample& one, const DrawExample& other) {
  const std::vector<Given> a = look_at(one);
  const std::vector<Given> b = look_at(other);
  const std::vector<uint32_t> places = drawing_ops(one.tape);
  DrawLaws laws;
  laws.ops = one.tape.ops.size();
  laws.layouts = layouts_found(one.tape);
  std::set<std::pair<size_t, uint16_t>> unclear;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size() || a[i].op != b[i].op ||
        a[i].shapes.size() != b[i].shapes.size()) {
      refuse(i < a.size() ? a[i].op : b[i].op,
             "other numbers of samples draw in other ops (number " + std::to_string(i + 1) + ")");
    }
    if (a[i].numbers != b[i].numbers) {
      refuse(a[i].op,
             "a number that it is given depends on how many samples there are, so it draws among "
             "samples that other micro-batches hold too; draw before the step");
    }
    DrawLaw law;
    law.op = a[i].op;
    law.place = places[i];
    for (const auto& [argument, shape] : a[i].shapes) {
      law.axes[argument] = axis_of(law.op, shape, one.rows, b[i].shapes.at(argument), other.rows);
      if (law.axes[argument].dim >= 0 && law.axes[argument].inner > 1) {
        unclear.emplace(i, argument);
      }
    }
    laws.laws.push_back(std::move(law));
  }
  if (!unclear.empty()) locate(other.rows > 1 ? other : one, laws, unclear);
  return laws;
}

std::unique_ptr<WholeBatchOp> draw_stand_in(const tape::Tape& tape, const tape::Op& op,
                                            const DrawLaw* law,
                                            std::shared_ptr<RandomStreams> streams) {
  const c10::ArrayRef<c10::IValue> arguments(tape.arguments);
  return std::make_unique<RandomDraw>(
      *op.facts, law,
      generator_of(arguments.slice(op.arguments.begin, op.arguments.end - op.arguments.begin)),
      std::move(streams));
}

}  // namespace infinitybatch::coupled
