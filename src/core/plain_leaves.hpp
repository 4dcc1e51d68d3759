#pragma once

#include <infinitybatch/core/batch.hpp>

#include <any>
#include <cstdint>
#include <string>
#include <vector>

namespace infinitybatch {

/// What a binding knows of leaves that are no tensors, which are any type of another language. May
/// be asked in any thread. C++ numbers and text are known here.
struct PlainLeaves {
  /// Whether both say the same; true where nobody can tell.
  bool (*alike)(const std::any& left, const std::any& right);
  /// Whether it may hang on how many samples there are: a number, but no truth value.
  bool (*is_number)(const std::any& value);
  std::string (*text)(const std::any& value);
  /// Text that another value would not have: all of it, or where it lies.
  std::string (*identity)(const std::any& value);
};

/// Once, by the binding.
void know_plain_leaves(const PlainLeaves& leaves);

/// The leaves that are no tensors, as text that other ones would not have. Empty without any.
std::string identity_of_plain_leaves(const Batch& batch);

/// Whether `outputs` holds numbers that are no tensors, so that a forward on another number of
/// samples tells more.
bool has_plain_numbers(const Batch& outputs);

/// Leaves that are no tensors stand once in the outputs of the whole batch, and so have to be the
/// same for every micro-batch: constants, text, nothing at all.
/// \param parts       outputs of consecutive rows; those of other structure are another's matter
/// \param row_counts  rows of each part
/// \param other_sizes whether forwards on another number of rows have been compared before
/// \throws BatchError naming a leaf that is not; or, where all parts have one size and nothing else
///         is known, that is the number of their rows
void check_plain_leaves(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                        bool other_sizes);

}  // namespace infinitybatch
