#include <infinitybatch/tape/row_numbers.hpp>

#include "flow.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <unordered_map>

namespace infinitybatch::tape {
namespace {

using Form = double (*)(double);

/// The ways in which a number can be made of another one.
constexpr std::array<Form, 6> kForms{
    [](double rows) { return rows; },
    [](double rows) { return rows - 1; },
    [](double rows) { return std::sqrt(rows); },
    [](double rows) { return 1 / rows; },
    [](double rows) { return 1 / (rows - 1); },
    [](double rows) { return 1 / std::sqrt(rows); },
};

bool is_made_of(double number, Form form, int64_t rows) {
  const double wanted = form(static_cast<double>(rows));
  // Numbers may have been tensors of single precision.
  return std::isfinite(wanted) && std::abs(std::abs(number) - wanted) <= 1e-6 * wanted;
}

bool is_made_of(double number, int64_t rows) {
  return number != 0 && std::abs(number) != 1 &&
         std::any_of(kForms.begin(), kForms.end(),
                     [&](const Form form) { return is_made_of(number, form, rows); });
}

/// Of what every other program has: 2 and its reciprocal, also the roots of 4 and 1 / 4.
bool is_common(double number) {
  return std::abs(number) == 2 || std::abs(number) == 0.5;
}

/// Arithmetic: not exponents, slopes and bounds.
bool scales(const OpFacts& facts) {
  constexpr std::array<std::string_view, 15> kNames{
      "add",         "sub",          "subtract", "rsub",    "mul",  "multiply",  "div", "divide",
      "true_divide", "floor_divide", "addcmul",  "addcdiv", "lerp", "full_like", "fill"};
  std::string_view name = facts.name();
  constexpr std::string_view kSpace = "aten::";
  if (!name.starts_with(kSpace)) return false;
  name.remove_prefix(kSpace.size());
  if (name.ends_with('_')) name.remove_suffix(1);
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// What was written by no op (`torch.tensor(0.5)`), whatever its type, which nobody has noted:
/// numbers of one type are no sensible numbers of another.
std::vector<double> numbers_in(const at::Tensor& bytes) {
  const auto as = [&](at::ScalarType type) { return bytes.view(type).item<double>(); };
  if (!bytes.device().is_cpu()) return {};
  if (bytes.numel() == 8) return {as(at::kDouble), as(at::kLong)};
  if (bytes.numel() == 4) return {as(at::kFloat), as(at::kInt)};
  return {};
}

/// Whether the schema calls it a number: no size, dimension, probability.
bool is_scalar(const OpFacts& facts, size_t argument) {
  const auto& arguments = facts.handle.schema().arguments();
  if (argument >= arguments.size()) return false;
  c10::TypePtr type = arguments[argument].type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::NumberType;
}

class Reader {
 public:
  Reader(const Tape& tape, const Batch& inputs) : tape_(tape), flow_(tape, inputs) {
    const at::NoGradGuard no_grad;
    for (const External& external : tape.externals) {
      const at::Tensor& tensor = external.tensor;
      if (!tensor.defined() || external.is_buffer || tensor.requires_grad()) continue;
      if (tensor.numel() != 1 || !tensor.device().is_cpu() || tensor.is_complex()) continue;
      constants_[tape.memories[external.value]] = {tensor.item<double>()};
    }
  }

  std::vector<GivenNumbers> read(const std::vector<bool>& outputs) {
    const std::vector<bool> leads = lead_to(tape_, outputs, /*indices=*/false);
    std::vector<GivenNumbers> given;
    size_t restore = 0;
    for (size_t i = 0; i < tape_.ops.size(); ++i) {
      const Op& op = tape_.ops[i];
      if (op.facts == nullptr) {
        const auto& [value, content] = tape_.restores[restore++];
        constants_[tape_.memories[value]] = numbers_in(content);
        continue;
      }
      if (!flow_.meets(op)) {
        meet_constants(op);
        continue;
      }
      if (leads[i] && scales(*op.facts)) given.push_back({op.facts, numbers_of(op)});
      flow_.pass(op);
    }
    return given;
  }

 private:
  static constexpr int64_t kOneNumber = 8;  // bytes

  std::vector<double> numbers_of(const Op& op) const {
    std::vector<double> numbers;
    for (uint32_t i = op.arguments.begin; i < op.arguments.end; ++i) {
      const c10::IValue& argument = tape_.arguments[i];
      if (!argument.isInt() && !argument.isDouble()) continue;
      if (is_scalar(*op.facts, i - op.arguments.begin)) {
        numbers.push_back(argument.toScalar().toDouble());
      }
    }
    for_each_argument(tape_, op, [&](ValueId value, const Slot&) {
      const auto constant = constants_.find(tape_.memories[value]);
      if (constant == constants_.end()) return;
      numbers.insert(numbers.end(), constant->second.begin(), constant->second.end());
    });
    return numbers;
  }

  /// `torch.full((), n)`, `torch.tensor(n).sqrt()`: a number stands for what it was made of.
  void meet_constants(const Op& op) {
    bool constant = true;
    for_each_argument(tape_, op, [&](ValueId value, const Slot&) {
      constant = constant && constants_.contains(tape_.memories[value]);
    });
    for (uint32_t o = op.outputs.begin; constant && o < op.outputs.end; ++o) {
      const ValueId output = tape_.outputs[o];
      if (output == kNoValue || tape_.memories[output] == kNoMemory) continue;
      const uint32_t memory = tape_.memories[output];
      if (tape_.memory_bytes[memory] <= kOneNumber) constants_[memory] = numbers_of(op);
    }
  }

  const Tape& tape_;
  Flow flow_;
  std::unordered_map<uint32_t, std::vector<double>> constants_;
};

}  // namespace

std::vector<GivenNumbers> numbers_for_samples(const Tape& tape, const Batch& inputs,
                                              const std::vector<bool>& outputs) {
  if (tape.opaque) return {};
  return Reader(tape, inputs).read(outputs);
}

bool may_count_rows(const std::vector<GivenNumbers>& given, int64_t rows) {
  return std::any_of(given.begin(), given.end(), [&](const GivenNumbers& op) {
    return std::any_of(op.numbers.begin(), op.numbers.end(),
                       [&](double number) { return is_made_of(number, rows); });
  });
}

bool likely_counts_rows(const std::vector<GivenNumbers>& given, int64_t rows) {
  return rows > 2 && std::any_of(given.begin(), given.end(), [&](const GivenNumbers& op) {
           return std::any_of(op.numbers.begin(), op.numbers.end(), [&](double number) {
             return !is_common(number) && is_made_of(number, rows);
           });
         });
}

std::optional<std::string> counts_rows(const std::vector<GivenNumbers>& here, int64_t rows,
                                       const std::vector<GivenNumbers>& there, int64_t other_rows) {
  if (here.size() != there.size()) return std::nullopt;
  std::optional<std::string> found;
  for (size_t i = 0; i < here.size(); ++i) {
    const auto& [facts, numbers] = here[i];
    const auto& [other_facts, others] = there[i];
    if (facts != other_facts || numbers.size() != others.size()) return std::nullopt;
    for (size_t k = 0; k < numbers.size() && !found; ++k) {
      const bool both = std::any_of(kForms.begin(), kForms.end(), [&](const Form form) {
        return is_made_of(numbers[k], form, rows) && is_made_of(others[k], form, other_rows);
      });
      if (both && numbers[k] != others[k]) found = facts->name();
    }
  }
  return found;
}

}  // namespace infinitybatch::tape
