#include "tape/witness.hpp"

#include "core/bits.hpp"

#include <ATen/ops/item.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <string>

namespace infinitybatch::tape {
namespace {

/// Python reads a tensor's memory itself after this op: `tolist()`, `numpy()`. Nothing else calls
/// it outside of other ops.
constexpr const char* kHandsOut = "aten::resolve_neg";

template <typename Visit>
bool any_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) return value.toTensor().defined() && visit(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  const auto elements = value.toListRef();
  return std::any_of(elements.begin(), elements.end(), [&](const c10::IValue& element) {
    return element.isTensor() && element.toTensor().defined() && visit(element.toTensor());
  });
}

/// Masks, indices and lengths are what sizes follow.
bool is_discrete(const at::Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

bool same_plain_number(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (!a.isDouble()) return a == b;
  return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
}

bool same_content(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         !any_bit_differs(a, b).item<bool>();
}

/// Everything but the content.
Witness form_of(c10::ArrayRef<c10::IValue> results) {
  Witness witness;
  for (const c10::IValue& result : results) {
    const auto note = [&](const at::Tensor& tensor) {
      witness.sizes.push_back(tensor.dim());
      witness.sizes.insert(witness.sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
      return false;
    };
    any_tensor(result, note);
    if (result.isScalar() || result.isBool()) witness.numbers.push_back(result);
  }
  return witness;
}

}  // namespace

bool shows_values(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  if (facts.reads_values || !facts.name().starts_with("aten::") || facts.name() == kHandsOut) {
    return true;
  }
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::IValue& each) { return any_tensor(each, is_discrete); });
}

Witness witness_of(const OpFacts& facts, c10::ArrayRef<c10::IValue> results) {
  Witness witness = form_of(results);
  if (facts.name() == kHandsOut && results[0].toTensor().defined()) {
    const at::NoGradGuard no_grad;
    const at::RecordFunctionGuard unseen(false);
    witness.content = results[0].toTensor().detach().clone();
  }
  return witness;
}

void check(const Witness& witness, const OpFacts& facts, c10::ArrayRef<c10::IValue> results) {
  const Witness now = form_of(results);
  const bool same = now.sizes == witness.sizes &&
                    std::equal(now.numbers.begin(), now.numbers.end(), witness.numbers.begin(),
                               witness.numbers.end(), same_plain_number);
  if (same &&
      (!witness.content.defined() || same_content(witness.content, results[0].toTensor()))) {
    return;
  }
  throw OtherValues("static_graph says that forward depends on shapes only, but " + facts.name() +
                    " shows it values that differ between micro-batches; leave static_graph out");
}

bool same_witnesses(const Tape& a, const Tape& b) {
  return std::equal(a.witnesses.begin(), a.witnesses.end(), b.witnesses.begin(), b.witnesses.end(),
                    [](const Witness& x, const Witness& y) {
                      return x.sizes == y.sizes && same_content(x.content, y.content) &&
                             std::equal(x.numbers.begin(), x.numbers.end(), y.numbers.begin(),
                                        y.numbers.end(), same_plain_number);
                    });
}

}  // namespace infinitybatch::tape
