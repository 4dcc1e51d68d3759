#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace infinitybatch {

/// The words in which numbers lie.
template <typename Number>
struct Bits;
template <>
struct Bits<double> {
  using Word = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
};
template <>
struct Bits<float> {
  using Word = uint32_t;
  static constexpr int kMantissa = 23, kBias = 127;
};
template <>
struct Bits<c10::Half> {
  using Word = uint16_t;
  static constexpr int kMantissa = 10, kBias = 15;
};
template <>
struct Bits<c10::BFloat16> {
  using Word = uint16_t;
  static constexpr int kMantissa = 7, kBias = 127;
};

/// Bits without a pattern, of a place.
constexpr uint32_t mixed(uint32_t place) {
  uint32_t bits = place * 0x9E3779B1U + 0x7F4A7C15U;
  bits = (bits ^ (bits >> 15)) * 0x2C1B3C6DU;
  return bits ^ (bits >> 13);
}

/// Calls `f` with a number of this type; not where it is none of the above.
template <typename F>
bool with_type(at::ScalarType type, F&& f) {
  switch (type) {
    case at::kDouble:
      f(double{});
      return true;
    case at::kFloat:
      f(float{});
      return true;
    case at::kHalf:
      f(c10::Half{});
      return true;
    case at::kBFloat16:
      f(c10::BFloat16{});
      return true;
    default:
      return false;
  }
}

}  // namespace infinitybatch
