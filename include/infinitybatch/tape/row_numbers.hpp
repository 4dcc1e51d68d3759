#pragma once

#include <infinitybatch/tape/tape.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::tape {

/// An op that is given values of the samples, and the numbers that it is given beside them.
struct GivenNumbers {
  const OpFacts* facts = nullptr;
  std::vector<double> numbers;
};

/// The numbers that meet values of the samples in arithmetic (`x / len(x)`,
/// `x * torch.tensor(0.5)`), op by op, on the way to these leaves of the result. Sizes, positions,
/// exponents, slopes and bounds are none, nor is what stands in tensors of several elements, or
/// elsewhere than on the CPU.
/// \param inputs of the recording, without their tensors maybe
std::vector<GivenNumbers> numbers_for_samples(const Tape& tape, const Batch& inputs,
                                              const std::vector<bool>& outputs);

/// Whether one of them could be made of the number of rows: it, one less, the square root of it, or
/// the reciprocal of one of these. 1 tells of none.
bool may_count_rows(const std::vector<GivenNumbers>& given, int64_t rows);
/// The same where it is worth a forward of the user's to find out: of two rows nothing is, because
/// every other program has a 2, a half, or the roots of them, nor are 2 and one half elsewhere.
bool likely_counts_rows(const std::vector<GivenNumbers>& given, int64_t rows);

/// Of the same program on two numbers of rows: the name of the first op whose number is made of
/// them both times. Nothing where other ops ran.
std::optional<std::string> counts_rows(const std::vector<GivenNumbers>& here, int64_t rows,
                                       const std::vector<GivenNumbers>& there, int64_t other_rows);

}  // namespace infinitybatch::tape
