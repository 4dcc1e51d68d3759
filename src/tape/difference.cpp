#include "core/bits.hpp"
#include "tape/segment.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <tuple>
#include <type_traits>
#include <utility>

namespace infinitybatch::tape {
namespace {

bool same_list(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b);

bool same_number(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isDouble()) {  // the bits: NaN equals NaN
    return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
  }
  if (a.isComplexDouble()) {  // and a zero's sign is seen by a logarithm
    const auto bits = [](const c10::IValue& number) {
      const c10::complex<double> value = number.toComplexDouble();
      return std::pair(std::bit_cast<uint64_t>(value.real()),
                       std::bit_cast<uint64_t>(value.imag()));
    };
    return bits(a) == bits(b);
  }
  if (a.isGenerator()) return true;  // forward may make one each time
  if (a.isList()) return same_list(a.toListRef(), b.toListRef());
  if (a.isTensor()) return !a.toTensor().defined() && !b.toTensor().defined();
  return a == b;
}

bool same_list(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same_number);
}

template <typename T>
auto stretch(const SharedVector<T>& all, Range range) {
  return c10::ArrayRef<T>(all).slice(range.begin, range.end - range.begin);
}

bool same_slots(const Tape& a, Range in_a, const Tape& b, Range in_b) {
  const auto x = stretch(a.slots, in_a);
  const auto y = stretch(b.slots, in_b);
  return x.size() == y.size() &&
         std::equal(x.begin(), x.end(), y.begin(), [&](const Slot& s, const Slot& t) {
           if (s.kind != t.kind || s.argument != t.argument || s.count != t.count) return false;
           if (s.kind == Slot::Kind::tensor) return s.first == t.first;
           return std::equal(a.elements.begin() + s.first, a.elements.begin() + s.first + s.count,
                             b.elements.begin() + t.first);
         });
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::NoGradGuard no_grad;
  return same_form(a, b) && !any_bit_differs(a, b).item<bool>();
}

/// Numbers that user code computes come as tensors that no op made.
bool same_found(const External& a, const External& b) {
  if (a.value != b.value || a.input_leaf != b.input_leaf) return false;
  if (a.tensor.is_same(b.tensor) || a.before.defined() || b.before.defined()) return true;
  return a.tensor.defined() && b.tensor.defined() && same_bits(a.tensor, b.tensor);
}

/// The very same, for whoever replays.
struct TheSame {
  template <typename T>
  bool operator()(const T& a, const T& b) const {
    return a == b;
  }
  bool operator()(const External& a, const External& b) const {
    return a.value == b.value && a.input_leaf == b.input_leaf && a.is_buffer == b.is_buffer &&
           a.version == b.version && a.tensor.is_same(b.tensor) && a.before.is_same(b.before);
  }
  bool operator()(const c10::IValue& a, const c10::IValue& b) const {
    if (a.isGenerator() && b.isGenerator()) return a.is(b);
    if (!same_number(a, b)) return false;
    return !a.isList() || *a.toList().elementType() == *b.toList().elementType();  // of empty ones
  }
};

std::string name_of(const Op& op) {
  return op.facts != nullptr ? op.facts->name() : "memory written outside of the dispatcher";
}

}  // namespace

std::optional<std::string> difference(const Tape& a, const Tape& b) {
  size_t restore = 0;
  for (size_t i = 0; i < std::max(a.ops.size(), b.ops.size()); ++i) {
    const std::string place = "op " + std::to_string(i) + ": ";
    if (i >= a.ops.size()) return place + name_of(b.ops[i]) + " ran the second time only";
    if (i >= b.ops.size()) return place + name_of(a.ops[i]) + " ran the first time only";
    const Op& x = a.ops[i];
    const Op& y = b.ops[i];
    if (x.facts != y.facts) return place + name_of(x) + ", then " + name_of(y);
    if (x.facts == nullptr) {
      const auto& [value, content] = a.restores[restore];
      const auto& [other_value, other] = b.restores[restore++];
      if (value != other_value || !same_bits(content, other)) {
        return place + name_of(x) + " had other values";
      }
      continue;
    }
    if (!(a.modes[x.modes] == b.modes[y.modes])) return place + name_of(x) + " in other modes";
    if (!same_list(stretch(a.arguments, x.arguments), stretch(b.arguments, y.arguments))) {
      return place + name_of(x) + " with other numbers";
    }
    const auto outputs = stretch(a.outputs, x.outputs);
    const auto others = stretch(b.outputs, y.outputs);
    if (!same_slots(a, x.slots, b, y.slots) || !outputs.equals(others)) {
      return place + name_of(x) + " on other tensors";
    }
  }
  if (!std::equal(a.externals.begin(), a.externals.end(), b.externals.begin(), b.externals.end(),
                  same_found)) {
    return "a tensor or number that no op made has another value";
  }
  if (a.result_values != b.result_values) return "other outputs";
  return std::nullopt;
}

void share_with_last(Tape& tape) {
  thread_local auto last = std::apply(
      [](auto&... arrays) {
        return std::tuple(typename std::remove_reference_t<decltype(arrays)>::Known()...);
      },
      shared_arrays(tape));
  std::apply(
      [&](auto&... arrays) {
        std::apply([&](auto&... known) { (arrays.share(known, TheSame()), ...); }, last);
      },
      shared_arrays(tape));
}

}  // namespace infinitybatch::tape
