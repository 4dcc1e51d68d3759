#pragma once

#include "step/wrapped_call.hpp"

#include <vector>

namespace infinitybatch {

/// Where a backward pass of a wrapped model meets the caller's graph: gradients of the joined
/// outputs come in, those of the whole inputs are put together, and what second forwards give is
/// compared with what the caller was given.
class WrapSeam {
 public:
  /// \param gradients for each of the node's inputs, undefined where none came
  WrapSeam(const WrappedCall& call, const std::vector<at::Tensor>& gradients);

  /// The gradient of one output leaf of these rows, in the type and on the device of `output`;
  /// undefined where nothing depends on it, or where the shape is another (`compare` has noted it).
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output) const;

  /// Notes whether the outputs of a second forward differ. What the caller has changed in place
  /// since cannot be compared any more.
  /// \param numbers outputs of the first that are one number; other leaves undefined
  void compare(Rows rows, const Batch& numbers, const Batch& outputs);
  /// Waits for the device.
  bool differs() const { return differs_.item<bool>(); }

  /// Adds the gradients that a micro-batch's own leaves have got.
  void collect(Rows rows, const Batch& micro);
  /// For each of `WrappedCall::wanted_inputs`; undefined where none came.
  const std::vector<at::Tensor>& of_inputs() const noexcept { return of_inputs_; }

 private:
  const WrappedCall& call_;
  const std::vector<at::Tensor>& gradients_;
  at::Tensor differs_;  // 0-dimensional bool
  std::vector<at::Tensor> of_inputs_;
};

/// The leaves of `outputs` that are one number; others undefined.
Batch numbers_of(const Batch& outputs);

}  // namespace infinitybatch
