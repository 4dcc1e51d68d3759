#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/rng.hpp"
#include "execute/buffer_values.hpp"
#include "execute/graph_memory.hpp"
#include "execute/setup.hpp"
#include "execute/whole_outputs.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// A coupled loss in two passes over the micro-batches: forwards that are recorded, the loss on the
/// outputs of all, then each micro-batch's backward from the gradient of its outputs. In between
/// its graph is kept (`retain`), or its tape is replayed, or where the tape is opaque the user's
/// forward runs again on the same rows under the same random state.
///
/// Each second forward's outputs are compared bit for bit with those that the loss saw; the result
/// is asked for once, by `check`.
class TwoPass {
 public:
  TwoPass(const Setup& setup, autograd::GradientSinks& sinks);

  /// First pass. Returns what the model gave, detached.
  /// \param retain keep the graph for `again`
  /// \param tells  somebody reads its recording, whether it is needed for `again` or not
  /// \param forward runs the user's model
  const Batch& first(Rows rows, const Batch& inputs, bool retain, bool tells,
                     const std::function<Batch()>& forward);
  /// Nobody reads the recording of these rows any more, unless `again` does.
  void has_told(Rows rows) { forget_recording(parts_.at(rows.begin)); }
  /// Not by playing its tape: for this reason the user's forward has to run again.
  void run_again(Rows rows, std::string reason) {
    tape::Tape& tape = parts_.at(rows.begin).tape;
    if (!tape.opaque) tape.opaque = std::move(reason);
  }
  /// The graph of these rows cannot be kept after all (buffers were restored under it).
  void drop_graph(Rows rows);
  /// Those of all rows. Returns whether there were any.
  bool drop_graphs();
  int64_t kept_graphs() const;
  /// Whether graphs of earlier rows are kept.
  bool keeps_graph_before(Rows rows) const;

  /// With `Strategy::offloads`: what waits of these rows, outputs and, with
  /// `Strategy::offloads_graphs`, a graph that is kept, begins to leave the device, has left, is
  /// there again (with `ahead` it begins to come). Return the bytes whose copies begin.
  int64_t leave(Rows rows);
  int64_t offload(Rows rows);
  int64_t fetch(Rows rows, bool ahead);

  /// The loss of all outputs, and the gradient of the outputs. Gradients of the loss's own
  /// parameters go to the sinks. Returns the loss, detached.
  at::Tensor whole_loss() { return outputs_.loss(sinks_); }

  /// With an external loss: the second pass begins, which may be once more.
  void begin_second_pass() { replayed_ = false; }
  /// The inputs that the graph of these rows leads to; null where it is not kept.
  const Batch* inputs_of_graph(Rows rows) const;
  /// Second pass: outputs of these rows with a graph.
  void again(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);
  /// Runs it backward from the gradient of the outputs.
  /// \param except leaves whose gradients do not belong to the sinks
  void backward(Rows rows, const std::vector<at::Tensor>& except = {});
  /// For measuring: stands for the gradient of the outputs where no loss was computed.
  void seed();
  void free();

  /// \throws tape::Mismatch, Unsupported where a second forward gave other outputs than the first
  void check() const;

  /// With `tells`, all that the first forward at work gave, detached; until `free`.
  const Batch& given() const noexcept { return given_; }
  /// The recording of these rows, from `first` to `again`; empty where there is none.
  const tape::Tape& tape(Rows rows) const { return parts_.at(rows.begin).tape; }
  /// The outputs of all, and where they wait.
  WholeOutputs& outputs() noexcept { return outputs_; }
  const WholeOutputs& outputs() const noexcept { return outputs_; }
  /// Of all graphs that were offloaded.
  const GraphBytes& graph_bytes() const noexcept { return graph_bytes_; }
  /// Of those that are kept now.
  GraphBytes kept_graph_bytes() const;
  /// Why the user's forward ran twice; nothing where it did not.
  const std::optional<std::string>& opaque() const noexcept { return opaque_; }
  /// Why it will, for the first rows of which it has to; nothing where it need not.
  std::optional<std::string> will_run_again() const;
  /// Whether a tape was played since the second pass began.
  bool replayed() const noexcept { return replayed_; }

 private:
  struct Part {
    Rows rows;
    RngSnapshot random;
    std::shared_ptr<const BufferValues> buffers;  // where one micro-batch's carry on into the next
    tape::Tape tape;
    bool recorded = false;              // `tape` is of a recording
    bool again = true;                  // a second forward may follow
    Batch inputs;                       // of the graph, where its leaves matter to others
    std::optional<Batch> graph;         // where retained
    std::optional<GraphMemory> memory;  // of that, where it is offloaded
  };
  void forget_recording(Part& part) const;
  int64_t offload_graph(Part& part);
  /// Whether a second forward of these rows plays their tape.
  bool replays(const Part& part) const { return strategy_.replays() && !part.tape.opaque; }
  const char* why_no_tapes() const;
  /// What others see of these rows' outputs, detached; see `ExternalLoss::take`.
  Batch& seen(Rows rows);
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output);

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  autograd::GradientSinks& sinks_;
  std::vector<at::Tensor> buffers_;
  std::vector<at::Device> devices_;
  std::map<int64_t, Part> parts_;  // by first row
  WholeOutputs outputs_;
  Batch given_;
  Batch at_work_;  // outputs with their graph, between `again` and `free`
  std::vector<at::Tensor> seeds_;
  bool replayed_ = false;
  GraphBytes graph_bytes_;
  std::optional<std::string> opaque_;
};

}  // namespace infinitybatch
