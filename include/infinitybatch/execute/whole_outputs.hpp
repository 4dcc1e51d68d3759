#pragma once

#include <infinitybatch/autograd/gradient_sinks.hpp>
#include <infinitybatch/core/row_range.hpp>
#include <infinitybatch/execute/job.hpp>

#include <map>
#include <vector>

namespace infinitybatch {

/// For measuring: in place of the gradient of each leaf of `outputs`; undefined where none is
/// wanted.
std::vector<at::Tensor> stand_in_gradients(const Batch& outputs);

/// The outputs of all micro-batches, the coupled loss on them, and the gradient that it gives each.
///
/// Outputs of a second forward are compared bit for bit with those that the loss saw, on the device
/// and without waiting for it.
class WholeOutputs {
 public:
  explicit WholeOutputs(const Job& job) : job_(job) {}

  /// Keeps what the model gave for these rows, detached, on the loss's device; returns that.
  const Batch& add(Rows rows, const Batch& outputs);

  /// The loss of all outputs, detached, and the gradient of the outputs. Gradients of the loss's
  /// own parameters go to the sinks.
  at::Tensor loss(autograd::GradientSinks& sinks);

  /// The gradient of one output leaf of these rows, on `device`; undefined where the loss ignores
  /// it.
  at::Tensor gradient(Rows rows, size_t leaf, at::Device device) const;

  /// Notes where the outputs of a second forward differ.
  void compare(Rows rows, const Batch& outputs);
  /// Whether any did. Waits for the device.
  bool differ() const;

  /// All outputs in order, detached.
  const Batch& all() const noexcept { return whole_; }

 private:
  struct Part {
    Rows rows;
    Batch outputs;
    std::vector<bool> wants_gradient;  // of each leaf
  };
  void assemble();
  at::Device device() const;

  const Job& job_;
  std::map<int64_t, Part> parts_;      // by first row
  Batch whole_;                        // outputs of all rows
  std::vector<bool> wants_gradient_;   // of each leaf of `whole_`
  std::vector<at::Tensor> gradients_;  // of each leaf of `whole_`; undefined where none is wanted
  at::Tensor differs_;                 // 0-dimensional bool
};

}  // namespace infinitybatch
