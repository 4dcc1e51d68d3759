#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What one instruction of a plan does. A new strategy is new instructions, not a new loop.
enum class Operation : uint8_t {
  load,      ///< bring a micro-batch's rows to the device
  forward,   ///< run the user's model on them, in grad mode
  loss,      ///< their share of the loss: sum / global denominator
  backward,  ///< add their gradients to the sinks
  // Of a coupled loss:
  record,      ///< load rows, run the model while its ops are recorded, keep outputs and tape
  retain,      ///< the same, keeping the graph
  whole_loss,  ///< the loss of all outputs, and their gradient
  replay,      ///< load rows; their outputs again, with a graph
  seed,        ///< while measuring only: stands for the gradient of the outputs
  // Of a model with ops that see the whole batch, whose tapes are cut in front of each of them:
  advance,            ///< take a micro-batch through a segment to the next cut
  advance_retained,   ///< the same, keeping the graph
  combine,            ///< the op in front of the segment has been given all micro-batches
  recompute,          ///< on the way back: to the next cut once more, where nothing is saved
  resume,             ///< play a segment with its graph
  combine_gradients,  ///< the op in front of the segment has the gradients of all micro-batches
  // Where what waits leaves the device:
  restore,         ///< what the visit needs of what waits is on the device again
  prefetch,        ///< the same, copied while something else computes: memory is taken now
  start_offload,   ///< what waits after the visit begins to leave; its memory is still taken
  finish_offload,  ///< it is away, its memory free
  free,            ///< let go of what the micro-batch held; restore buffers
  penalty,         ///< the loss's own term on parameters, once
  hand_out,        ///< the sums become `.grad`
};

const char* name_of(Operation operation);

struct Instruction {
  Operation operation = Operation::load;
  int64_t micro_batch =
      -1;                ///< index into `Plan::micro_batch_sizes`; -1 for the whole logical batch
  int64_t segment = -1;  ///< of the micro-batch's cut tape; -1 for the whole. Of the whole logical
                         ///< batch: the stretch behind an op that sees it
  bool back = false;     ///< of an offload: of a visit that goes back (`resume`, `replay`)
  bool leaves = false;   ///< forward: what is saved in front of the segment goes
};

/// Ops that see the whole batch, from 1, in front of which the boundary activations of all
/// micro-batches are kept, rising; those in front of the others are computed again on the way back.
/// Nothing: all are kept.
using KeptBoundaries = std::optional<std::vector<int64_t>>;

/// One micro-batch size that the planner looked at.
struct Candidate {
  int64_t micro_batch_size = 0;
  int64_t peak_bytes = 0;                    ///< predicted
  std::optional<double> seconds_per_sample;  ///< measured, where it was
  bool feasible = false;                     ///< the predicted peak is inside the budget
};

/// Seconds of a step in which offloaded values were copied.
struct CopySeconds {
  double hidden = 0;  ///< while the step computed
  double waited = 0;  ///< while it did nothing else
};

/// Writes seconds for people: "1.2 ms", "3.4 s".
std::string format_seconds(double seconds);

/// The memory that graphs keep for backward.
struct GraphBytes {
  int64_t offloaded = 0;  ///< left the device
  int64_t stayed = 0;  ///< did not: Python holds it as well, or it is not the device's allocator's
};

/// How a logical batch is computed, as data: the executor runs the instructions, the simulator
/// predicts from the same ones, `explain` prints them.
struct Plan {
  std::string strategy;  ///< "stream", "replay", "cut" or "checkpoint"
  int64_t batch_size = 0;
  std::vector<int64_t> micro_batch_sizes;
  /// What the longest sample of each micro-batch has, where rows are sorted by length
  /// (`Options::trim`) and planned by it. Empty otherwise.
  std::vector<int64_t> lengths;
  std::vector<Instruction> instructions;

  std::optional<int64_t> budget_bytes;
  int64_t baseline_bytes =
      0;  ///< live when the step starts: parameters, optimizer state, inputs there
  std::optional<int64_t> predicted_peak_bytes;
  std::optional<double> predicted_seconds;
  std::vector<Candidate> candidates;
  std::string reason;  ///< what decided the size

  int64_t retained = 0;          ///< micro-batches that keep their graph
  bool offloads_graphs = false;  ///< then these wait away from the device, too
  int64_t segments = 1;  ///< one more than ops that see the whole batch, or than cuts for memory
  KeptBoundaries kept_boundaries;

  bool offloads = false;        ///< what waits at cuts leaves the device
  bool overlaps = false;        ///< and is copied while other micro-batches compute
  int64_t offloaded_bytes = 0;  ///< in the last step that followed it; each time counted
  GraphBytes graph_bytes;       ///< of the graphs among it
  CopySeconds offload_seconds;  ///< of the same step
  /// Of the next one: from what its instructions took, and how fast copies were. Not on
  /// accelerators, which compute behind the instructions.
  std::optional<CopySeconds> predicted_offload_seconds;

  bool computes_whole_loss() const;  ///< on the outputs of all micro-batches
  /// Samples of the micro-batches that keep their graph.
  int64_t retained_samples() const;
  /// Micro-batches whose graph is kept away from the device.
  int64_t offloaded_graphs() const noexcept { return offloads_graphs ? retained : 0; }
  /// The size of the largest micro-batch.
  int64_t micro_batch_size() const;
  /// "boundary activations are kept at 2 of 9 ops …" for people; empty where all are.
  std::string explain_kept() const;
  /// For people: what was chosen, what else was possible, what bounds it.
  std::string explain() const;
};

}  // namespace infinitybatch
