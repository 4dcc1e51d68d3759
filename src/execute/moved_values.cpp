#include "execute/moved_values.hpp"

#include "core/extent.hpp"
#include "core/tensor_memory.hpp"
#include "core/tensor_parts.hpp"
#include "core/unwatched.hpp"
#include "execute/last_bits.hpp"
#include "execute/number_bits.hpp"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

/// Whoever holds it may move values, of any model: they may share memory.
std::mutex one_at_a_time;

constexpr int64_t kPiece = int64_t{1} << 22;  // numbers that go over the host at a time

/// Exchanges bits of each number. Doing it again undoes it: which bits are exchanged depends on the
/// place, and on bits that stay.
/// \param zero the power of two that stands for zero
template <typename Number>
void exchange_bits(Number* numbers, int64_t count, uint32_t place, int zero, bool sign) {
  using Word = typename Bits<Number>::Word;
  constexpr int kMantissa = Bits<Number>::kMantissa;
  constexpr Word kOne = 1;
  constexpr Word kSign = static_cast<Word>(kOne << (sizeof(Word) * 8 - 1));
  constexpr Word kSmall = static_cast<Word>(Word{15} << (kMantissa - 6));  // an eighth to a 64th
  constexpr Word kExponent = static_cast<Word>(~kSign & ~((kOne << kMantissa) - 1));
  const Word exponent =
      static_cast<Word>(static_cast<Word>(std::max(1, zero + Bits<Number>::kBias)) << kMantissa);
  for (int64_t i = 0; i < count; ++i) {
    const Word random = static_cast<Word>(mixed(place + static_cast<uint32_t>(i)));
    const Word small = static_cast<Word>(static_cast<Word>((random & 11U) | 4U)
                                         << (kMantissa - 6));  // a 16th always
    const Word for_zero =
        static_cast<Word>(exponent | (static_cast<Word>((random >> 4) & 3U) << (kMantissa - 2)));
    const Word signed_zero = sign && (random & 64U) != 0 ? kSign : Word{0};
    Word word = std::bit_cast<Word>(numbers[i]);
    const Word stays = static_cast<Word>(word & ~kSmall & ~kSign);
    const bool finite = (word & kExponent) != kExponent;
    if (stays == 0 || stays == for_zero) {
      word = static_cast<Word>(word ^ for_zero ^ signed_zero);
    } else if (finite) {
      word = static_cast<Word>(word ^ small);
    }
    numbers[i] = std::bit_cast<Number>(word);
  }
}

/// Scales by a power of two, in integers: whatever the mode of the processor, no bit is lost.
template <typename Number>
void shift_exponents(Number* numbers, int64_t count, int by) {
  using Word = typename Bits<Number>::Word;
  constexpr int kMantissa = Bits<Number>::kMantissa;
  constexpr Word kExponent =
      static_cast<Word>(((Word{1} << (sizeof(Word) * 8 - 1)) - 1) & ~((Word{1} << kMantissa) - 1));
  if (by == 0) return;
  const Word step = static_cast<Word>(static_cast<Word>(std::abs(by)) << kMantissa);
  for (int64_t i = 0; i < count; ++i) {
    const Word word = std::bit_cast<Word>(numbers[i]);
    if ((word & kExponent) == 0) continue;
    numbers[i] = std::bit_cast<Number>(static_cast<Word>(by > 0 ? word + step : word - step));
  }
}

/// On memory of the host.
void move_here(const at::Tensor& flat, uint32_t place, int scale, int zero, bool sign, bool there) {
  with_type(flat.scalar_type(), [&](auto number) {
    using Number = decltype(number);
    auto* numbers = static_cast<Number*>(flat.mutable_data_ptr());
    if (there) shift_exponents(numbers, flat.numel(), scale);
    exchange_bits(numbers, flat.numel(), place, zero, sign);
    if (!there) shift_exponents(numbers, flat.numel(), -scale);
  });
}

/// The largest size.
double largest_of(const at::Tensor& flat) {
  if (!flat.is_cpu()) {
    const auto [least, most] = at::aminmax(flat);
    return at::maximum(most, -least).item<double>();
  }
  double largest = 0;
  with_type(flat.scalar_type(), [&](auto number) {
    const auto* numbers = static_cast<const decltype(number)*>(flat.const_data_ptr());
    for (int64_t i = 0; i < flat.numel(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(numbers[i])));
    }
  });
  return largest;
}

}  // namespace

MovedValues::MovedValues(const std::vector<NamedParameter>& parameters,
                         const std::vector<at::Tensor>& buffers,
                         const coupled::WatchedMemory& memory)
    : memory_(memory) {
  const Unwatched unseen;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  for (const NamedParameter& parameter : parameters) {
    if (parameter.tensor.requires_grad()) add(parameter.tensor, /*parameter=*/true);
  }
  for (const at::Tensor& buffer : buffers) add(buffer, /*parameter=*/false);
}

MovedValues::~MovedValues() {
  try {
    off();
  } catch (...) {  // the device is lost, and all that lies there
  }
}

void MovedValues::add(const at::Tensor& tensor, bool parameter) {
  if (!can_be_moved(tensor)) return;
  Values added;
  if (const auto place = memory_.find(tensor)) {
    const coupled::WatchedMemory::Known& known = memory_[*place];
    if (known.rescaled || known.before.defined()) return;  // it is put back from a copy
    added.known = true;
    added.place = *place;
  } else if (parameter) {
    return;
  }
  added.flat = flat_of(tensor);
  if (!with_type(added.flat.scalar_type(), [](auto) {})) return;
  const auto extent = extent_of(added.flat);
  for (const Values& each : values_) {  // tied, or views of one memory
    if (storage_of(each.flat) != storage_of(added.flat)) continue;
    const auto other = extent_of(each.flat);
    if (extent.first < other.second && other.first < extent.second) return;
  }
  const int64_t fan = tensor.dim() < 2 ? 1 : std::max<int64_t>(1, tensor.numel() / tensor.size(0));
  added.size = -2 - std::ilogb(std::sqrt(static_cast<double>(fan)));
  const double largest = largest_of(added.flat);
  // Ids, labels, a count. Zeros may be a gate.
  if (!parameter && largest > 0 && are_whole(added.flat)) return;
  constexpr int kTiny = 3;
  if (largest > 0 && std::isfinite(largest)) {
    const int apart = added.size - std::ilogb(largest);
    if (apart >= kTiny) added.scale = apart;
  }
  added.sign = parameter;
  values_.push_back(std::move(added));
}

void MovedValues::move(const Values& values, const at::Tensor& flat, bool there) const {
  const auto number = static_cast<uint32_t>(&values - values_.data());
  const uint32_t place = number * 0x632BE5ABU;
  if (flat.is_cpu()) {
    return move_here(flat, place, values.scale, values.size, values.sign, there);
  }
  for (int64_t begin = 0; begin < flat.numel(); begin += kPiece) {
    at::Tensor piece = flat.narrow(0, begin, std::min(kPiece, flat.numel() - begin));
    const at::Tensor here = piece.cpu();
    move_here(here, place + static_cast<uint32_t>(begin), values.scale, values.size, values.sign,
              there);
    piece.copy_(here);
  }
}

void MovedValues::nudge(const Values& values, uint32_t which) const {
  const auto number = static_cast<uint32_t>(&values - values_.data());
  const bool coarse = at::autocast::is_autocast_enabled(values.flat.device().type());
  turn_last_bits(values.flat, mixed(number + 0x51ED270BU * which), coarse);
}

void MovedValues::renew_copy(const Values& values) const {
  if (!values.known) return;
  const at::Tensor& before = memory_[values.place].before;
  if (before.defined()) at::Tensor(before).copy_(memory_[values.place].memory);
}

MovedValues::Nudge::Nudge(MovedValues& values, uint32_t which) : values_(values), which_(which) {
  if (!values_.on_) {
    alone_ = std::unique_lock(one_at_a_time, std::try_to_lock);
    if (!alone_) return;
  }
  const Unwatched unseen;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  for (; nudged_ < values_.values_.size(); ++nudged_) {
    values_.nudge(values_.values_[nudged_], which_);
  }
  at::autocast::clear_cache();
}

MovedValues::Nudge::~Nudge() {
  const Unwatched unseen;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  try {
    for (; nudged_ > 0; --nudged_) {
      values_.nudge(values_.values_[nudged_ - 1], which_);
      values_.renew_copy(values_.values_[nudged_ - 1]);
    }
  } catch (...) {  // the device is lost, and all that lies there
  }
  at::autocast::clear_cache();
}

void MovedValues::on() {
  if (on_) return;
  alone_ = std::unique_lock(one_at_a_time, std::try_to_lock);
  if (!alone_) return;
  const Unwatched unseen;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  on_ = true;
  for (moved_ = 0; moved_ < values_.size(); ++moved_) {
    move(values_[moved_], values_[moved_].flat, /*there=*/true);
  }
  at::autocast::clear_cache();
}

void MovedValues::off() {
  if (!on_) return;
  const Unwatched unseen;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  on_ = false;
  const std::unique_lock<std::mutex> until_then = std::move(alone_);
  for (; moved_ > 0; --moved_) {
    const Values& values = values_[moved_ - 1];
    move(values, values.flat, /*there=*/false);
    renew_copy(values);
  }
  at::autocast::clear_cache();
}

}  // namespace infinitybatch
