#pragma once

#include <infinitybatch/autograd/gradient_sinks.hpp>
#include <infinitybatch/core/row_range.hpp>
#include <infinitybatch/execute/job.hpp>
#include <infinitybatch/execute/waiting_room.hpp>

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
///
/// With `Job::store`, and a loss that is computed on the model's device, they wait there: outputs
/// until the loss, and then, micro-batch by micro-batch, what its second forward is compared with
/// and the gradient. While the loss is at work all of them are on the device.
class WholeOutputs {
 public:
  explicit WholeOutputs(const Job& job) : job_(job) {}

  /// Keeps what the model gave for these rows, detached, on the loss's device; returns that.
  const Batch& add(Rows rows, const Batch& outputs);

  /// The loss of all outputs, detached, and the gradient of the outputs. Gradients of the loss's
  /// own parameters go to the sinks.
  at::Tensor loss(autograd::GradientSinks& sinks);

  /// With `Job::store`: what waits of these rows begins to leave the device, has left, is there
  /// again (with `ahead` it begins to come), and is needed no more. Return the bytes whose copies
  /// begin.
  int64_t leave(Rows rows);
  int64_t park(Rows rows);
  int64_t fetch(Rows rows, bool ahead);
  void forget(Rows rows);

  /// The gradient of one output leaf of these rows, on `device`; undefined where the loss ignores
  /// it.
  at::Tensor gradient(Rows rows, size_t leaf, at::Device device);

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
    WaitingRoom waiting;               // with a store: outputs and gradients, by leaf
  };
  void assemble();
  at::Tensor compute(autograd::GradientSinks& sinks);
  void disperse();
  Batch seen(Part& part);
  at::Device device() const;
  bool parks() const { return job_.store != nullptr && device() == job_.device; }
  /// Where a leaf of a micro-batch waits.
  static tape::Crossing output(size_t leaf) { return {static_cast<tape::ValueId>(leaf), 0}; }
  static tape::Crossing gradient(size_t leaf) { return {static_cast<tape::ValueId>(leaf), 1}; }
  WaitingRoom& settled(Part& part);

  const Job& job_;
  std::map<int64_t, Part> parts_;      // by first row
  Batch whole_;                        // outputs of all rows
  std::vector<bool> wants_gradient_;   // of each leaf of `whole_`
  std::vector<at::Tensor> gradients_;  // of each leaf of `whole_`; undefined where none is wanted
  bool dispersed_ = false;             // both wait by micro-batch, but for what all of them share
  at::Tensor differs_;                 // 0-dimensional bool
};

}  // namespace infinitybatch
