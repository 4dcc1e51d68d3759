#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>

namespace infinitybatch {

/// Whether its numbers lie in memory in which they may be exchanged for a while.
bool can_be_moved(const at::Tensor& tensor);

/// All numbers of a plain tensor in a row, in the order of memory, past the version counter.
at::Tensor flat_of(const at::Tensor& tensor);

// What stands for another rounding leaves whole numbers alone, and makes none: an id, a flag or a
// count that is held as a float is no more rounded than one that is held as an integer, and what is
// equal to it would be no longer.

/// Turns the last bit of about half of the numbers. Doing it again undoes it.
/// \param flat   see `flat_of`
/// \param place  another number, other places
/// \param coarse the last bit that a type of half the size keeps
void turn_last_bits(const at::Tensor& flat, uint32_t place, bool coarse);

/// Gives numbers other last bits, by a formula of each value: equal numbers stay equal. Numbers of
/// a few bits (0.5) stay as whole ones do.
/// \param which another number, other bits
void round_otherwise(const at::Tensor& flat, uint32_t which);

/// Whether all of them are whole numbers.
bool are_whole(const at::Tensor& flat);

}  // namespace infinitybatch
