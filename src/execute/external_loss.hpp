#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/errors.hpp>

#include <cstddef>

namespace infinitybatch {

/// A recording that was to be cut holds nothing that sees the whole batch.
class NothingToCut : public Error {
 public:
  NothingToCut() : Error("no op of the model sees the whole batch") {}
};

/// Whoever computes the loss outside of the step: takes the outputs of all micro-batches while a
/// plan runs up to the loss, and gives their gradient while the rest of it runs, which may be much
/// later, never, or more than once.
class ExternalLoss {
 public:
  virtual ~ExternalLoss() = default;

  /// \param inputs  that forward ran on; empty where it ran in segments
  /// \param outputs of these rows, with their graph where it is kept
  /// \returns those of them that a loss may read
  virtual Batch take(Rows rows, const Batch& inputs, Batch outputs) = 0;
  /// What was taken of these rows, detached, until the outputs of all are joined.
  virtual Batch& taken(Rows rows) = 0;
  /// Forward on these inputs once more, where no tape can be played in its place: as it ran the
  /// first time but for its random numbers, which are set.
  virtual Batch forward_again(const Batch& inputs) = 0;
  /// \param outputs of a second forward on these rows
  virtual void compare(Rows rows, const Batch& outputs) = 0;
  /// The gradient of one output leaf of these rows, in the shape of `output`; undefined where
  /// nothing depends on it.
  virtual at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output) const = 0;
  /// A graph of these rows has run backward. Gradients of the inputs' own leaves are in their
  /// `.grad`; more may come from other segments.
  virtual void collect(Rows rows, const Batch& inputs) = 0;
};

}  // namespace infinitybatch
