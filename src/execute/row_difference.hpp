#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>

#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What one forward gave, and for which rows.
struct RowsOfOutputs {
  Batch outputs;
  Rows rows;
};

/// A leaf of the outputs whose rows differ.
struct RowDifference {
  size_t leaf = 0;
  std::string what;       ///< for people
  int64_t dim = -1;       ///< along which rows lie; -1: they have no place
  at::Tensor apart = {};  ///< how far each row is apart, on the host; of one number without a place
};

/// How several places of each sample lie along the first dimension of an output.
enum class Flattened : uint8_t {
  no,           ///< there are not several of each
  unknown,      ///< there may be: values do not tell
  together,     ///< row n * places + place
  interleaved,  ///< row place * samples + n
};
/// \param whole of samples 0 to `all`
/// \param part  of some of them alone
Flattened flattened(const at::Tensor& whole, int64_t all, const at::Tensor& part, Rows rows);

/// Where `part`, some of the rows of `whole`, has other rows of outputs. Leaves without a place for
/// each sample (one number, a sum), and rows whose other dimensions differ (padding), say nothing.
///
/// Two numbers are the same where they are within `rounding_of` them.
/// \param compared which leaves matter; empty: all
/// \param dims     see `RowsSeen::dims`: several places of a sample are compared in a known order
std::vector<RowDifference> differences(const RowsOfOutputs& whole, const RowsOfOutputs& part,
                                       const std::vector<bool>& compared,
                                       const std::vector<int64_t>& dims);

/// Strikes out rows that another rounding moves as far as they differ, and leaves of which no row
/// is left: a row that it moves explains no other.
/// \param outputs of the part
/// \param rounded the same, rounded otherwise
/// \param times   differences of so many times what moves do not count; of four times where it
///                moves far above rounding, as a choice that turns
void explain(std::vector<RowDifference>& differences, const Batch& outputs, const Batch& rounded,
             double times);

/// Where outputs are a list with an entry for each sample: micro-batches of one sample give the
/// first entry alone, and what would be joined is no list of all.
std::optional<std::string> values_per_sample(const RowsOfOutputs& whole, const RowsOfOutputs& part);

/// The first of the leaves that have a place for each sample along several dimensions, as where
/// samples are compared with each other: their values may be anything.
std::optional<RowDifference> several_places(const RowsOfOutputs& whole, const RowsOfOutputs& part,
                                            const std::vector<bool>& compared);

/// Of outputs whose rows are the same, along which dimension they are; `kInterleaved` where those
/// of several samples are interleaved in the first, -1 where that is not known.
std::vector<int64_t> dims_of_rows(const RowsOfOutputs& whole, const RowsOfOutputs& part);

}  // namespace infinitybatch
