#pragma once

#include <infinitybatch/autograd/gradient_sinks.hpp>
#include <infinitybatch/core/rng.hpp>
#include <infinitybatch/execute/graph_memory.hpp>
#include <infinitybatch/execute/job.hpp>
#include <infinitybatch/execute/whole_outputs.hpp>
#include <infinitybatch/tape/tape.hpp>

#include <functional>
#include <map>
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
  TwoPass(const Job& job, autograd::GradientSinks& sinks);

  /// First pass. Returns what the model gave, detached.
  /// \param retain keep the graph for `again`
  /// \param forward runs the user's model
  const Batch& first(Rows rows, const Batch& inputs, bool retain,
                     const std::function<Batch()>& forward);
  /// The graph of these rows cannot be kept after all (buffers were restored under it).
  void drop_graph(Rows rows);
  /// Whether graphs of earlier rows are kept.
  bool keeps_graph_before(Rows rows) const;

  /// With `Job::store`: what waits of these rows, outputs and, with `Job::offloads_graphs`, a graph
  /// that is kept, begins to leave the device, has left, is there again (with `ahead` it begins to
  /// come). Return the bytes whose copies begin.
  int64_t leave(Rows rows);
  int64_t offload(Rows rows);
  int64_t fetch(Rows rows, bool ahead);

  /// The loss of all outputs, and the gradient of the outputs. Gradients of the loss's own
  /// parameters go to the sinks. Returns the loss, detached.
  at::Tensor whole_loss() { return outputs_.loss(sinks_); }

  /// Second pass: outputs of these rows with a graph.
  void again(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);
  /// Runs it backward from the gradient of the outputs.
  void backward(Rows rows);
  /// For measuring: stands for the gradient of the outputs where no loss was computed.
  void seed();
  void free();

  /// \throws tape::Mismatch, Unsupported where a second forward gave other outputs than the first
  void check() const;

  /// The recording of these rows, from `first` to `again`; empty where there is none.
  const tape::Tape& tape(Rows rows) const { return parts_.at(rows.begin).tape; }
  /// The outputs of all, and where they wait.
  WholeOutputs& outputs() noexcept { return outputs_; }
  const WholeOutputs& outputs() const noexcept { return outputs_; }
  /// Of all graphs that were offloaded.
  const GraphBytes& graph_bytes() const noexcept { return graph_bytes_; }
  /// Why the user's forward ran twice; nothing where it did not.
  const std::optional<std::string>& opaque() const noexcept { return opaque_; }

 private:
  struct Part {
    Rows rows;
    RngSnapshot random;
    std::vector<at::Tensor> buffers;  // copies, where one micro-batch's carry on into the next
    tape::Tape tape;
    std::optional<Batch> graph;         // where retained
    std::optional<GraphMemory> memory;  // of that, where it is offloaded
  };
  int64_t offload_graph(Part& part);

  const Job& job_;
  autograd::GradientSinks& sinks_;
  std::vector<at::Tensor> buffers_;
  std::vector<at::Device> devices_;
  std::map<int64_t, Part> parts_;  // by first row
  WholeOutputs outputs_;
  Batch at_work_;  // outputs with their graph, between `again` and `free`
  std::vector<at::Tensor> seeds_;
  bool replayed_ = false;
  GraphBytes graph_bytes_;
  std::optional<std::string> opaque_;
};

}  // namespace infinitybatch
