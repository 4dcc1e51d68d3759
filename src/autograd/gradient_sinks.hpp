#pragma once

#include "autograd/gradient_norms.hpp"

#include <infinitybatch/core/model.hpp>

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::autograd {

/// What a sink did with one gradient; the planner reads it beside an allocation trace.
struct SinkEvent {
  const void* gradient = nullptr;  ///< address of the gradient that came in
  const void* buffer = nullptr;  ///< address of the buffer after it: equal where it was taken over
  int64_t buffer_bytes = 0;
  bool product = false;  ///< the gradient was added as it was computed and took no memory
};

/// Collects the gradients of many micro-batches, one buffer per parameter, and hands them out once.
///
/// While it lives, graphs that are built send the parameters' gradients here: they are added in
/// place, no hook fires, and `.grad` is untouched, so that a failure leaves nothing behind.
/// `hand_out` passes each sum through torch's own accumulator: hooks fire once, on the full
/// gradient. Buffers of half precision parameters are fp32.
class GradientSinks {
 public:
  /// \param nested may stand inside other sinks of this thread, which get the gradients again when
  ///               these are gone: a graph node that runs a backward of its own
  /// \param installed otherwise `install` comes first
  /// \throws StateError where another step is running on one of `parameters`
  explicit GradientSinks(const std::vector<NamedParameter>& parameters, bool nested = false,
                         bool installed = true);
  ~GradientSinks();
  GradientSinks(const GradientSinks&) = delete;
  GradientSinks& operator=(const GradientSinks&) = delete;

  /// Gives a sink of its own to each leaf of the graph behind `roots` that is no parameter (an own
  /// tensor of the loss, an input that requires grad), so that its gradient waits for `hand_out`
  /// too.
  /// \param except leaves whose gradient the caller takes from their `.grad`
  /// \param once the graph runs backward once: gradients of weights that are products of two
  ///             matrices are added to their sums as they are computed
  void redirect_other_leaves(const std::vector<at::Tensor>& roots,
                             const std::vector<at::Tensor>& except = {}, bool once = false);

  /// `made` is what another run of the same forward has put in the place of `stands`, which stays:
  /// until `forget_dead_leaves` gradients of the one are the other's.
  void let_stand(const at::Tensor& made, const at::Tensor& stands);

  /// After `uninstall`: the graph behind `roots` ends where it would without these sinks.
  void release(const std::vector<at::Tensor>& roots) const;

  /// From now on this leaf too is one that the constructor was given. Call it before any graph runs
  /// backward.
  /// \param installed otherwise `install` comes first
  void adopt(const at::Tensor& leaf, bool installed = true);

  /// Lets go of leaves that died with their micro-batch. Call it when the graph is gone.
  void forget_dead_leaves();

  /// Sends gradients back to where they went before; buffers stay. Graphs that were built meanwhile
  /// still end here.
  void uninstall();

  /// After `uninstall`: graphs that are built from now on send the parameters' gradients here too.
  /// \throws StateError as the constructor
  void install();

  /// Gradients that come in from now on are the next micro-batch's; for whoever asks for their
  /// norms (NormMeter).
  void next_micro_batch();
  /// What comes in from now on belongs to no micro-batch.
  void end_micro_batches();

  /// Adds every buffer to its tensor's `.grad`, hooks included, and empties the buffers.
  /// `.grad` is as it was where a hook throws, whatever else the hooks did.
  void hand_out();

  /// Instead of `hand_out`: the sums, one for each tensor that the constructor was given (different
  /// ones, all of which require grad), in its own type, undefined where no gradient came in.
  /// Empties the buffers.
  std::vector<at::Tensor> take();

  /// Whether a leaf that the constructor was not given is alive.
  bool has_other_leaves() const noexcept { return entries_.size() > parameter_count_; }

  /// Called for every gradient that comes in while set; for the planner's probes.
  void watch(std::function<void(const SinkEvent&)> watcher);

  /// Bytes of all buffers.
  int64_t bytes() const;

 private:
  struct Slot;
  class Sink;
  class HandOut;
  struct Entry;
  Entry& add(const at::Tensor& variable);
  /// Where `node` multiplies rows by a parameter.
  static void add_products_of(torch::autograd::Node& node);
  /// \param which names it where somebody else has it
  /// \param name goes behind that: no text is made of all names in each step
  void install(Entry& entry, const char* which, const std::string* name = nullptr);

  std::vector<std::unique_ptr<Entry>> entries_;
  std::shared_ptr<std::function<void(const SinkEvent&)>> watcher_;
  std::shared_ptr<NormCounter> norms_;  ///< null where nobody asks
  std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins_;
  size_t parameter_count_ = 0;
  bool nested_;
};

}  // namespace infinitybatch::autograd
