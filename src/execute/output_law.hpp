#pragma once

#include "execute/row_difference.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/errors.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What one forward told of its outputs.
struct OutputForm {
  Batch outputs;                   ///< detached
  int64_t rows = 0;                ///< that it ran on
  std::vector<bool> from_samples;  ///< for each leaf: whether its values may come from them
  std::optional<std::string> why;  ///< why nobody knows where they come from (an opaque tape)
  /// For each leaf how several places of a sample lie in it, once that was tried; or empty.
  std::vector<Flattened> flattened = {};
};

/// How a model's outputs follow its samples: a leaf has one dimension in which they lie, or is the
/// same for any of them (a parameter, a penalty, a constant). Such a leaf stands once in the
/// outputs of the whole batch, as it does natively, and one micro-batch alone is handed its
/// gradient.
struct OutputLaw {
  struct OfLeaf {
    int64_t dims = -1;                  ///< how many it has; -1: it is no tensor
    int64_t batch_dim = Leaf::kShared;  ///< `kShared`: the same for any samples
    Flattened flattened = Flattened::no;
    bool compares = false;  ///< samples lie along another dimension too: those of one micro-batch
    bool once() const noexcept { return dims >= 0 && batch_dim == Leaf::kShared; }
  };
  std::vector<OfLeaf> leaves;

  /// Whether it is the law of outputs like these.
  bool fits(const Batch& outputs) const;
};

/// Whether one forward is not enough to tell: a leaf has several dimensions of that size, or does
/// not come from the samples.
bool needs_other_rows(const OutputForm& form);

/// Whether a leaf may have several places for each sample along its first dimension: comparing the
/// same samples among others tells (`RowChecks::try_flattened`).
bool may_be_flattened(const OutputForm& form);

/// \param other of a forward on another number of other rows; nothing where none is needed
/// \throws BatchError naming the leaf that cannot be joined, and the way out
OutputLaw find_output_law(const OutputForm& form, const OutputForm* other);

/// \throws BatchError that says why a loss cannot use what compares the samples of a micro-batch
[[noreturn]] void refuse_compared(const Batch& outputs, size_t leaf);
/// The same as an error to throw.
BatchError compared(const Batch& outputs, size_t leaf);
/// Where a loss of `rows` samples fails on outputs that compare them, with targets that compare all
/// `total`. \throws BatchError caused by the error at work
void explain_compared(const Batch& outputs, const Batch& targets, int64_t rows, int64_t total);

/// The outputs of all rows. Leaves that stand once are taken from the first part.
/// \param parts      outputs of consecutive rows, detached
/// \param row_counts rows of each part
/// \param expected   for each leaf: where defined, what a leaf that stands once has to be
/// \throws BatchError naming the leaf that cannot be joined, or that should stand once and of which
///         micro-batches give different values
Batch join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts, const OutputLaw& law,
           const std::vector<at::Tensor>& expected);

/// The same where a look at rows has told how samples lie.
/// \param known_dims see `RowsSeen::dims`
Batch join(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
           const std::vector<int64_t>& known_dims);

/// \throws BatchError where a leaf that stands once is not the same in `part`, bit for bit
void check_same(const at::Tensor& first, const at::Tensor& part, const std::string& name);

}  // namespace infinitybatch
