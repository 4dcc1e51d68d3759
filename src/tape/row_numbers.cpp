#include "tape/row_numbers.hpp"

#include "tape/flow.hpp"

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
// Numbers may have been tensors of single precision.
constexpr double kPrecision = 1e-6;

bool is_near(double number, double wanted) {
  return std::isfinite(wanted) && std::abs(number - wanted) <= kPrecision * std::abs(wanted);
}

bool is_made_of(double number, int64_t rows) {
  const auto count = static_cast<double>(rows);
  return number != 0 && std::abs(number) != 1 &&
         std::any_of(kForms.begin(), kForms.end(),
                     [&](const Form form) { return is_near(std::abs(number), form(count)); });
}

/// The number of elements of something with a row for each sample, the count doubled or halved, or
/// one more than it.
bool is_made_of_multiple(double number, int64_t rows) {
  const double size = std::abs(number);
  const auto count = static_cast<double>(rows);
  if (size == 0 || size == 1) return false;
  if (size > count && std::floor(size) == size && std::fmod(size, count) == 0) return true;
  const std::array<double, 3> made{2 * count, count / 2, count + 1};
  return std::any_of(made.begin(), made.end(), [&](double wanted) {
    return is_near(size, wanted) || is_near(size, 1 / wanted);
  });
}

/// Whether two numbers differ as the numbers of rows do that they were met with: as a power of
/// them, by a number added, or by a reciprocal, root or logarithm of such a sum.
bool follow_rows(double here, int64_t rows, double there, int64_t other_rows) {
  if (here == there || !std::isfinite(here) || !std::isfinite(there)) return false;
  if (here * there > 0) {
    const double log_rows = std::log(static_cast<double>(rows) / static_cast<double>(other_rows));
    const double power = std::abs(std::log(here / there) / log_rows);
    for (const double known : {0.25, 1.0 / 3, 0.5, 1.0, 1.5, 2.0}) {
      if (std::abs(power - known) <= kPrecision / std::abs(log_rows)) return true;
    }
  }
  constexpr std::array<Form, 5> kBack{
      [](double number) { return number; },
      [](double number) { return 1 / number; },
      [](double number) { return number * number; },
      [](double number) { return 1 / (number * number); },
      [](double number) { return std::exp(number); },
  };
  const auto apart = static_cast<double>(std::abs(rows - other_rows));
  return std::any_of(kBack.begin(), kBack.end(), [&](const Form back) {
    const double a = back(here);
    const double b = back(there);
    const double doubt = kPrecision * std::max({std::abs(a), std::abs(b), 1.0});
    return doubt < 0.01 && std::abs(std::abs(a - b) - apart) <= doubt;
  });
}

/// Of what every other program has: 2 and its reciprocal, also the roots of 4 and 1 / 4.
bool is_common(double number) {
  return std::abs(number) == 2 || std::abs(number) == 0.5;
}

/// Arithmetic. Elsewhere numbers are exponents, slopes and bounds, and tensors of numbers choose
/// rows.
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
      constants_[tape.memories[external.value]] = {nullptr, {tensor.item<double>()}};
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
        constants_[tape_.memories[value]] = {nullptr, numbers_in(content)};
        continue;
      }
      if (!flow_.meets(op)) {
        meet_constants(op);
        continue;
      }
      const bool arithmetic = scales(*op.facts);
      if (leads[i]) given.push_back({op.facts, numbers_of(op, arithmetic), arithmetic});
      flow_.pass(op);
    }
    // Positions of samples among the outputs, say.
    for (size_t i = 0; i < tape_.result_values.size() && i < outputs.size(); ++i) {
      const ValueId value = tape_.result_values[i];
      if (!outputs[i] || value == kNoValue) continue;
      const auto made = constants_.find(tape_.memories[value]);
      if (made == constants_.end() || made->second.facts == nullptr) continue;
      given.push_back({made->second.facts, made->second.numbers, true});
    }
    return given;
  }

 private:
  static constexpr size_t kMost = 16;

  /// What nothing of the samples has gone into.
  struct Made {
    const OpFacts* facts = nullptr;  // by which op; null where it was found
    std::vector<double> numbers;     // it was made of
  };

  /// \param of_tensors those too that its arguments were made of
  std::vector<double> numbers_of(const Op& op, bool of_tensors) const {
    std::vector<double> numbers;
    for (uint32_t i = op.arguments.begin; i < op.arguments.end; ++i) {
      const c10::IValue& argument = tape_.arguments[i];
      if (!argument.isInt() && !argument.isDouble()) continue;
      if (is_scalar(*op.facts, i - op.arguments.begin)) {
        numbers.push_back(argument.toScalar().toDouble());
      }
    }
    for_each_argument(tape_, op, [&](ValueId value, const Slot&) {
      const auto made = constants_.find(tape_.memories[value]);
      if (!of_tensors || made == constants_.end()) return;
      for (const double number : made->second.numbers) {
        const bool known = std::find(numbers.begin(), numbers.end(), number) != numbers.end();
        if (!known && numbers.size() < kMost) numbers.push_back(number);
      }
    });
    return numbers;
  }

  /// `torch.full((), n)`, `torch.tensor(n).sqrt()`, `table[torch.arange(n)]`: what it was made of
  /// stands for it.
  void meet_constants(const Op& op) {
    std::vector<double> numbers = numbers_of(op, /*of_tensors=*/true);
    if (numbers.empty()) return;
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const ValueId output = tape_.outputs[o];
      if (output == kNoValue || tape_.memories[output] == kNoMemory) continue;
      constants_[tape_.memories[output]] = {op.facts, numbers};
    }
  }

  const Tape& tape_;
  Flow flow_;
  std::unordered_map<uint32_t, Made> constants_;
};

}  // namespace

std::vector<GivenNumbers> numbers_for_samples(const Tape& tape, const Batch& inputs,
                                              const std::vector<bool>& outputs) {
  if (tape.opaque) return {};
  return Reader(tape, inputs).read(outputs);
}

bool may_count_rows(const std::vector<GivenNumbers>& given, int64_t rows) {
  return std::any_of(given.begin(), given.end(), [&](const GivenNumbers& op) {
    return op.arithmetic && std::any_of(op.numbers.begin(), op.numbers.end(),
                                        [&](double number) { return is_made_of(number, rows); });
  });
}

bool likely_counts_rows(const std::vector<GivenNumbers>& given, int64_t rows) {
  return rows > 2 && std::any_of(given.begin(), given.end(), [&](const GivenNumbers& op) {
           return op.arithmetic &&
                  std::any_of(op.numbers.begin(), op.numbers.end(), [&](double number) {
                    return !is_common(number) &&
                           (is_made_of(number, rows) || is_made_of_multiple(number, rows));
                  });
         });
}

bool has_numbers(const std::vector<GivenNumbers>& given) {
  return std::any_of(given.begin(), given.end(),
                     [](const GivenNumbers& op) { return !op.numbers.empty(); });
}

std::optional<std::string> counts_rows(const std::vector<GivenNumbers>& here, int64_t rows,
                                       const std::vector<GivenNumbers>& there, int64_t other_rows) {
  if (here.size() != there.size()) return std::nullopt;
  std::optional<std::string> found;
  for (size_t i = 0; i < here.size(); ++i) {
    const std::vector<double>& numbers = here[i].numbers;
    const std::vector<double>& others = there[i].numbers;
    if (here[i].facts != there[i].facts || numbers.size() != others.size()) return std::nullopt;
    for (size_t k = 0; k < numbers.size() && !found; ++k) {
      if (follow_rows(numbers[k], rows, others[k], other_rows)) found = here[i].facts->name();
    }
  }
  return found;
}

}  // namespace infinitybatch::tape
