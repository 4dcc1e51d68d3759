#pragma once

#include "tape/tape.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::tape {

/// An op that is given values of the samples, and the numbers that it is given beside them.
struct GivenNumbers {
  const OpFacts* facts = nullptr;
  std::vector<double> numbers;
  bool arithmetic = false;  ///< they scale or shift; elsewhere they are exponents, slopes, bounds
};

/// The numbers that meet values of the samples (`x / len(x)`, `x * torch.tensor(0.5)`), op by op,
/// on the way to these leaves of the result, and those that leaves were made of into which nothing
/// of the samples went. A tensor stands for the numbers that the ops were given which made it
/// (`x + torch.arange(len(x))`), where it scales or shifts. Sizes, and what chooses rows, are none,
/// nor is what stands in found tensors of several elements, or elsewhere than on the CPU.
/// \param inputs of the recording, without their tensors maybe
std::vector<GivenNumbers> numbers_for_samples(const Tape& tape, const Batch& inputs,
                                              const std::vector<bool>& outputs);

/// Whether one of them in arithmetic could be made of the number of rows: it, one less, the square
/// root of it, or the reciprocal of one of these. 1 tells of none.
bool may_count_rows(const std::vector<GivenNumbers>& given, int64_t rows);
/// The same, and multiples, twice and half of it, and one more, where it is worth a forward of the
/// user's to find out: of two rows nothing is, because every other program has a 2, a half, or the
/// roots of them, nor are 2 and one half elsewhere.
bool likely_counts_rows(const std::vector<GivenNumbers>& given, int64_t rows);

/// Whether a recording of another number of rows has anything to be compared with.
bool has_numbers(const std::vector<GivenNumbers>& given);

/// Of the same program on two numbers of rows: the name of the first op whose number differs as
/// they do: as c nᵖ for a common p, as n + c, or as a reciprocal, root or logarithm of that. Other
/// differences may be chance (Python's random numbers). Nothing where other ops ran.
std::optional<std::string> counts_rows(const std::vector<GivenNumbers>& here, int64_t rows,
                                       const std::vector<GivenNumbers>& there, int64_t other_rows);

}  // namespace infinitybatch::tape
