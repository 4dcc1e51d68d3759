#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/row_range.hpp"
#include "tape/tape.hpp"

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch::coupled {

/// Buffers that an op of the whole batch updates: their values as they will be.
class SettledBuffers {
 public:
  struct Entry {
    at::Tensor buffer;
    at::Tensor value;
  };
  /// What the buffer holds now: an earlier op of the same forward may have settled it.
  at::Tensor current(const at::Tensor& buffer) const;
  void settle(const at::Tensor& buffer, at::Tensor value);
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// Stands in for one op of the model that sees the whole logical batch, while the batch comes in
/// micro-batches:
///
///     for each micro-batch: collect     what the op is given
///     combine
///     for each micro-batch: apply       the op's result, differentiable
///     for each micro-batch: (its graph runs backward) collect_gradient
///     combine_gradients
///     for each micro-batch: correct     adds what only the whole batch knows to its gradient
///
/// `apply` may be called again for the same micro-batch, with or without a backward after it.
///
/// What requires grad for one micro-batch and not for another requires it in the whole batch, as
/// rows do that are stacked: whether the op is differentiable is known once all are collected.
class WholeBatchOp {
 public:
  using Arguments = std::vector<c10::IValue>;
  virtual ~WholeBatchOp() = default;

  /// \param arguments require grad where they did in forward
  /// \throws CouplingError where the op mixes the samples in another way than it can stand in for
  virtual void collect(Rows rows, const Arguments& arguments) = 0;
  /// Runs in the modes of the op.
  virtual void combine(SettledBuffers& buffers) = 0;

  /// \param leaves gets leaves of the result's graph whose gradient `collect_gradient` reads
  virtual at::Tensor apply(Rows rows, const Arguments& arguments,
                           std::vector<at::Tensor>& leaves) = 0;
  /// In front of a backward pass: forgets the gradients of an earlier one.
  /// \param keep another one may follow; without it each `combine_gradients` is the last
  virtual void begin_backward(bool /*keep*/) {}
  /// \param leaves as `apply` gave them
  virtual void collect_gradient(Rows rows, const std::vector<at::Tensor>& leaves) = 0;
  /// \param sinks for gradients of leaves that the op itself uses
  virtual void combine_gradients(autograd::GradientSinks& sinks) = 0;

  /// How many tensors among its arguments, in order, `correct` has to be called for.
  virtual size_t corrected() const { return 0; }
  /// \param which    of them
  /// \param input    that tensor
  /// \param gradient of it so far, changed in place; undefined: none so far
  virtual void correct(Rows /*rows*/, size_t /*which*/, const at::Tensor& /*input*/,
                       at::Tensor& /*gradient*/) const {}
};

/// Whether somebody can stand in for the operator of this name.
bool has_stand_in(std::string_view name);

/// Positions of the ops in `tape` that see the whole batch and for which somebody can stand in.
std::vector<uint32_t> whole_batch_ops(const tape::Tape& tape);
bool is_whole_batch_op(const tape::Tape& tape, const tape::Op& op);
/// Whether it is one because it draws random numbers, see `Tape::whole_draws`.
bool draws_for_all(const tape::Tape& tape, const tape::Op& op);
/// Whether a micro-batch on its own gives the op another result than the whole batch does.
bool is_provisional(const tape::Tape& tape, const tape::Op& op);

/// Whether two micro-batches run the same layer: the same operator, numbers, parameters and
/// buffers.
bool same_layer(const tape::Tape& a, const tape::Op& x, const tape::Tape& b, const tape::Op& y);

/// The first whole-batch op that is given a tensor which does not come from the samples (a
/// parameter, positions, a leaf that all micro-batches share): the whole batch has it once.
/// \param from_samples for each leaf of the inputs, whether it is split
std::optional<std::string> given_something_else(const tape::Tape& tape,
                                                const std::vector<bool>& from_samples);

/// Who stands in for the op.
std::unique_ptr<WholeBatchOp> stand_in(const tape::Tape& tape, const tape::Op& op);

/// The first op that reads values which are only known once a whole-batch op has seen the whole
/// batch: on the host, as a shape, or as statistics in a buffer. What follows it is then not known
/// from a recording of micro-batches on their own.
/// \param tape not trimmed
std::optional<std::string> early_read(const tape::Tape& tape);

}  // namespace infinitybatch::coupled
