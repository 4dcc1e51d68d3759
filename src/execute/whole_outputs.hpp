#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/row_range.hpp"
#include "execute/row_difference.hpp"
#include "execute/setup.hpp"
#include "execute/shared_outputs.hpp"
#include "execute/waiting_room.hpp"

#include <ATen/SequenceNumber.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

class CarriedState;
class LossWatch;

/// For measuring: in place of the gradient of each leaf of `outputs`; undefined where none is
/// wanted.
std::vector<at::Tensor> stand_in_gradients(const Batch& outputs);

/// The outputs of all micro-batches, the coupled loss on them, and the gradient that it gives each.
///
/// Outputs of a second forward are compared bit for bit with those that the first one gave, on the
/// device and without waiting for it. The loss may change in place what it is given, as natively:
/// where it is about to, what is compared is copied first. Outputs that are one tensor are one
/// tensor here, too; of others that share memory none can be written. A tensor that a forward made
/// and that the loss reads past the outputs (an auxiliary loss on the module, features that a hook
/// captured) is one micro-batch's alone: it is refused where there are several.
///
/// With `Strategy::offloads`, and a loss that is computed on the model's device, they wait there:
/// outputs until the loss, and then, micro-batch by micro-batch, what its second forward is
/// compared with and the gradient. While the loss is at work all of them are on the device.
class WholeOutputs {
 public:
  explicit WholeOutputs(const Setup& setup)
      : problem_(setup.problem), strategy_(setup.strategy), resources_(setup.resources) {}

  /// Keeps what the model gave for these rows, detached, on the loss's device; returns that.
  const Batch& add(Rows rows, const Batch& outputs);
  /// That is what leaves that stand once in the outputs of all rows have to be (see `OutputLaw`).
  void expect(const Batch& outputs);
  /// Another micro-batch will tell how outputs follow the samples, for it has another number of
  /// rows; see `OutputForm`.
  void know_sources(std::vector<bool> from_samples, std::optional<std::string> why,
                    std::vector<Flattened> flattened);

  /// Who knows what forwards left in attributes, which the loss may find there.
  void watch_attributes(const CarriedState& state) { state_ = &state; }

  /// The loss of all outputs, detached, and the gradient of the outputs. Gradients of the loss's
  /// own parameters go to the sinks.
  /// \throws BatchError where outputs cannot be joined, or the loss uses what compares the samples
  ///         of a micro-batch
  /// \throws Unsupported where it reads another tensor that a forward of a part of the batch made,
  /// or
  ///         writes an output whose memory another one shares
  at::Tensor loss(autograd::GradientSinks& sinks);

  /// With `Strategy::offloads`: what waits of these rows begins to leave the device, has left, is
  /// there again (with `ahead` it begins to come), and is needed no more. Return the bytes whose
  /// copies begin.
  int64_t leave(Rows rows);
  int64_t offload(Rows rows);
  int64_t fetch(Rows rows, bool ahead);
  /// The outputs of these rows, until they wait.
  Batch& of(Rows rows) { return parts_.at(rows.begin).outputs; }
  /// No second forward of these rows will be compared with them.
  void compare_none(Rows rows) { parts_.at(rows.begin).compared = false; }
  void forget(Rows rows);

  /// The gradient of one output leaf of these rows, on `device`; undefined where the loss ignores
  /// it.
  at::Tensor gradient(Rows rows, size_t leaf, at::Device device);

  /// Notes where the outputs of a second forward differ.
  void compare(Rows rows, const Batch& outputs);
  /// Whether any did. Waits for the device.
  bool differ() const;

  /// All outputs in order, detached, as the loss left them; with `Problem::keep_outputs`.
  const Batch& all() const noexcept { return left_; }
  /// For each leaf, whether the loss depends on it, once it is known.
  const std::vector<bool>& read() const noexcept { return read_; }

 private:
  struct Part {
    Rows rows;
    Batch outputs;
    std::vector<bool> wants_gradient;  // of each leaf
    bool compared = true;              // with a second forward
    WaitingRoom waiting;               // with a store: outputs and gradients, by leaf
  };
  void assemble();
  void check_read(const at::Tensor& tensor, uint64_t loss_begins) const;
  void copy_before_write(size_t leaf);
  at::Tensor compute(autograd::GradientSinks& sinks);
  void disperse();
  Batch seen(Part& part);
  void find_law(const std::vector<Batch>& outputs, const std::vector<int64_t>& row_counts);
  static at::Tensor handed(const at::Tensor& output, std::vector<at::Tensor>& leaves);
  at::Tensor computed(const Batch& outputs, const Batch& targets, LossWatch& watch);
  void explain_compared() const;
  at::Device device() const;
  /// Those of a wrapped model, whose tapes stay, are its caller's.
  bool offloads() const {
    return strategy_.offloads() && !problem_.goes_back_again && device() == problem_.device;
  }
  /// Where a leaf of a micro-batch waits.
  static tape::Crossing output(size_t leaf) { return {static_cast<tape::ValueId>(leaf), 0}; }
  static tape::Crossing gradient(size_t leaf) { return {static_cast<tape::ValueId>(leaf), 1}; }
  WaitingRoom& settled(Part& part);

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  const uint64_t first_node_ = at::sequence_number::peek();  // of graphs that forwards make
  const CarriedState* state_ = nullptr;
  std::map<int64_t, Part> parts_;     // by first row
  Batch whole_;                       // outputs of all rows, as the model gave them
  Batch left_;                        // as the loss left them, with `keep_outputs`
  std::vector<at::Tensor> expected_;  // of each leaf; undefined where unknown
  std::vector<bool> from_samples_;    // the same; empty where nobody needs to know
  std::optional<std::string> why_;
  std::vector<Flattened> flattened_;
  SharedOutputs shared_;               // by what micro-batches gave
  std::vector<bool> read_;             // of each leaf of `whole_`: by the loss
  std::vector<bool> wants_gradient_;   // of each leaf of `whole_`
  std::vector<at::Tensor> gradients_;  // of each leaf of `whole_`; undefined where none is wanted
  bool dispersed_ = false;             // both wait by micro-batch, but for what all of them share
  at::Tensor differs_;                 // 0-dimensional bool
};

}  // namespace infinitybatch
