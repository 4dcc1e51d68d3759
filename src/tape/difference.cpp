#include "core/bits.hpp"
#include "tape/segment.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <functional>
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
bool same_argument(const c10::IValue& a, const c10::IValue& b) {
  return a.isGenerator() && b.isGenerator() ? a.is(b) : same_number(a, b);
}

bool same_external(const External& a, const External& b) {
  return a.value == b.value && a.input_leaf == b.input_leaf && a.is_buffer == b.is_buffer &&
         a.version == b.version && a.tensor.is_same(b.tensor) && a.before.is_same(b.before);
}

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
  thread_local struct {
    SharedVector<Op>::Known ops;
    SharedVector<uint32_t>::Known memories;
    SharedVector<int64_t>::Known memory_bytes;
    SharedVector<External>::Known externals;
    SharedVector<c10::IValue>::Known arguments;
    SharedVector<Slot>::Known slots;
    SharedVector<ValueId>::Known elements, outputs, releases, result_values;
    SharedVector<Modes>::Known modes;
    SharedVector<uint32_t>::Known origins;
  } last;
  const auto share = [](auto& all, auto& known) { return all.share(known, std::equal_to<>()); };
  const bool same_ops = share(tape.ops, last.ops);
  share(tape.memories, last.memories);
  share(tape.memory_bytes, last.memory_bytes);
  tape.externals.share(last.externals, same_external);
  // An empty list is told from another by the op alone that takes it.
  tape.arguments.share(last.arguments, [same_ops](const c10::IValue& a, const c10::IValue& b) {
    return same_ops && same_argument(a, b);
  });
  share(tape.slots, last.slots);
  share(tape.elements, last.elements);
  share(tape.outputs, last.outputs);
  share(tape.releases, last.releases);
  share(tape.modes, last.modes);
  share(tape.origins, last.origins);
  share(tape.result_values, last.result_values);
}

}  // namespace infinitybatch::tape
