#include "execute/last_bits.hpp"

#include "core/tensor_parts.hpp"
#include "execute/number_bits.hpp"

#include <ATen/Functions.h>
#include <ATen/MapAllocator.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

namespace infinitybatch {
namespace {

// Those that a device works on at once. Its ops need some times their memory.
constexpr int64_t kPieceThere = int64_t{1} << 20;

/// Whether another process may read it meanwhile (`share_memory_`, a mapped file).
bool is_mapped(const at::Tensor& tensor) {
  const c10::DataPtr& memory = tensor.storage().data_ptr();
  return at::MapAllocator::fromDataPtr(memory) != nullptr ||
         at::RefcountedMapAllocator::fromDataPtr(memory) != nullptr;
}

/// The largest whole number below which the type has all of them: larger ones are whole by their
/// size alone.
template <typename Number>
constexpr double kMostWhole = static_cast<double>(uint64_t{1} << (Bits<Number>::kMantissa + 1));

template <typename Number>
bool is_whole(Number number) {
  const double value = static_cast<double>(number);
  return std::abs(value) <= kMostWhole<Number> && value == std::trunc(value);
}

template <typename Number>
at::Tensor whole_there(const at::Tensor& flat) {
  return flat.trunc().eq(flat).logical_and_(flat.abs().le(kMostWhole<Number>));
}

template <typename Number>
bool is_number(Number number) {
  return std::isfinite(static_cast<double>(number));
}

/// On the memory of a device, piece by piece.
/// \param change `void(piece, first place)`
template <typename Change>
void in_pieces_there(const at::Tensor& flat, const Change& change) {
  for (int64_t begin = 0; begin < flat.numel(); begin += kPieceThere) {
    const int64_t count = std::min(kPieceThere, flat.numel() - begin);
    change(flat.narrow(0, begin, count), static_cast<uint32_t>(begin));
  }
}

template <typename Number>
using SignedWord = std::make_signed_t<typename Bits<Number>::Word>;

template <typename Number>
at::Tensor words_of(const at::Tensor& flat) {
  return flat.view(c10::CppTypeToScalarType<SignedWord<Number>>::value);
}

/// The last bit, or with `coarse` the last one that a type of half the size keeps.
template <typename Number>
typename Bits<Number>::Word last_bit(bool coarse) {
  constexpr int kMantissa = Bits<Number>::kMantissa;
  constexpr int kKept = std::min(kMantissa, Bits<c10::BFloat16>::kMantissa);
  using Word = typename Bits<Number>::Word;
  return static_cast<Word>(Word{1} << (coarse ? kMantissa - kKept : 0));
}

template <typename Number>
void turn_here(Number* numbers, int64_t count, uint32_t place, bool coarse) {
  using Word = typename Bits<Number>::Word;
  const Word bit = last_bit<Number>(coarse);
  for (int64_t i = 0; i < count; ++i) {
    if ((mixed(place + static_cast<uint32_t>(i)) & 16U) == 0) continue;
    const auto turned =
        std::bit_cast<Number>(static_cast<Word>(std::bit_cast<Word>(numbers[i]) ^ bit));
    const bool stays =
        is_whole(numbers[i]) || is_whole(turned) || !is_number(numbers[i]) || !is_number(turned);
    if (!stays) numbers[i] = turned;
  }
}

/// At every other place or so, without a pattern.
template <typename Number>
void turn_there(const at::Tensor& flat, uint32_t place, bool coarse) {
  const at::Tensor words = words_of<Number>(flat);
  const auto bit = static_cast<SignedWord<Number>>(last_bit<Number>(coarse));
  const at::Tensor turned = words.bitwise_xor(bit);
  const at::Tensor as_numbers = turned.view(flat.scalar_type());
  at::Tensor turns = whole_there<Number>(flat).logical_or_(whole_there<Number>(as_numbers));
  turns = turns.logical_not_().logical_and_(flat.isfinite()).logical_and_(as_numbers.isfinite());
  const at::Tensor places =
      at::arange(place, place + flat.numel(), words.options().dtype(at::kLong));
  turns.logical_and_(places.mul_(0x2C1B3C6D).bitwise_right_shift(13).bitwise_and_(1).ne(0));
  words.copy_(at::where(turns, turned, words));
}

/// The bits that another rounding may give otherwise: as far as kernels are apart.
template <typename Number>
constexpr typename Bits<Number>::Word kRounded = sizeof(Number) < 4 ? 1 : 3;

/// Those that a number of a few bits has none of; none of a short type, whose numbers are all such.
template <typename Number>
constexpr typename Bits<Number>::Word fine_bits() {
  using Word = typename Bits<Number>::Word;
  constexpr int kFew = 11;
  if constexpr (sizeof(Number) < 4) {
    return 0;
  } else {
    return static_cast<Word>((Word{1} << (Bits<Number>::kMantissa - kFew)) - 1);
  }
}

template <typename Number>
void round_here(Number* numbers, int64_t count, uint32_t which) {
  using Word = typename Bits<Number>::Word;
  constexpr Word kFine = fine_bits<Number>();
  for (int64_t i = 0; i < count; ++i) {
    const Word word = std::bit_cast<Word>(numbers[i]);
    const bool few = kFine != 0 && (word & kFine) == 0;
    if (few || is_whole(numbers[i]) || !is_number(numbers[i])) continue;
    const Word stays = static_cast<Word>(word & ~kRounded<Number>);
    const auto folded = static_cast<uint32_t>(word ^ (uint64_t{word} >> 32U));
    const uint32_t random = mixed(folded + 0x51ED270BU * which) >> 7U;
    numbers[i] = std::bit_cast<Number>(static_cast<Word>(stays | (random & kRounded<Number>)));
  }
}

template <typename Number>
void round_there(const at::Tensor& flat, uint32_t which) {
  const at::Tensor words = words_of<Number>(flat);
  const auto rounded = static_cast<SignedWord<Number>>(kRounded<Number>);
  const at::Tensor stays = words.bitwise_and(static_cast<SignedWord<Number>>(~rounded));
  // Not in place: words of eight bytes are those of the numbers themselves.
  const at::Tensor random = words.to(at::kLong)
                                .mul(int64_t{0x2C1B3C6D} + 2 * int64_t{which})
                                .bitwise_right_shift(13)
                                .bitwise_and_(int64_t{rounded});
  at::Tensor turns = whole_there<Number>(flat).logical_not_().logical_and_(flat.isfinite());
  constexpr auto kFine = static_cast<SignedWord<Number>>(fine_bits<Number>());
  if (kFine != 0) turns.logical_and_(words.bitwise_and(kFine).ne(0));
  words.copy_(at::where(turns, stays.bitwise_or(random.to(words.scalar_type())), words));
}

}  // namespace

bool can_be_moved(const at::Tensor& tensor) {
  return tensor.defined() && is_plain(tensor) && tensor.numel() > 0 && !tensor.is_meta() &&
         !tensor.is_conj() && !tensor.is_neg() && !is_mapped(tensor) &&
         tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense() &&
         (tensor.is_complex() || tensor.is_floating_point());
}

at::Tensor flat_of(const at::Tensor& tensor) {
  const at::Tensor alias = tensor.variable_data();
  const at::Tensor row = alias.as_strided({alias.numel()}, {1}, alias.storage_offset());
  return row.is_complex() ? at::view_as_real(row).view({-1}) : row;
}

void turn_last_bits(const at::Tensor& flat, uint32_t place, bool coarse) {
  with_type(flat.scalar_type(), [&](auto kind) {
    using Number = decltype(kind);
    if (flat.is_cpu()) {
      return turn_here(static_cast<Number*>(flat.mutable_data_ptr()), flat.numel(), place, coarse);
    }
    in_pieces_there(flat, [&](const at::Tensor& piece, uint32_t begin) {
      turn_there<Number>(piece, place + begin, coarse);
    });
  });
}

void round_otherwise(const at::Tensor& flat, uint32_t which) {
  with_type(flat.scalar_type(), [&](auto kind) {
    using Number = decltype(kind);
    if (flat.is_cpu()) {
      return round_here(static_cast<Number*>(flat.mutable_data_ptr()), flat.numel(), which);
    }
    in_pieces_there(flat,
                    [&](const at::Tensor& piece, uint32_t) { round_there<Number>(piece, which); });
  });
}

bool are_whole(const at::Tensor& flat) {
  bool all = true;
  with_type(flat.scalar_type(), [&](auto kind) {
    using Number = decltype(kind);
    if (!flat.is_cpu()) {
      in_pieces_there(flat, [&](const at::Tensor& piece, uint32_t) {
        all = all && whole_there<Number>(piece).all().template item<bool>();
      });
      return;
    }
    const auto* numbers = static_cast<const Number*>(flat.const_data_ptr());
    all = std::all_of(numbers, numbers + flat.numel(), [](Number each) { return is_whole(each); });
  });
  return all;
}

}  // namespace infinitybatch
