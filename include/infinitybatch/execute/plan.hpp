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
  resume,             ///< play a segment with its graph
  combine_gradients,  ///< the op in front of the segment has the gradients of all micro-batches
  // Where what waits leaves the device:
  restore,        ///< what `advance` needs of what waits is on the device again
  restore_back,   ///< what `resume` and `backward` need of it
  prefetch,       ///< as `restore`, but copied while something else computes: memory is taken now
  prefetch_back,  ///< as `restore_back`
  start_offload,  ///< after `advance`: what waits begins to leave; its memory is still taken
  start_offload_back,   ///< the same after `backward`
  finish_offload,       ///< after `advance`: what waits is away, its memory free
  finish_offload_back,  ///< after `backward`
  free,                 ///< let go of what the micro-batch held; restore buffers
  penalty,              ///< the loss's own term on parameters, once
  hand_out,             ///< the sums become `.grad`
};

const char* name_of(Operation operation);

struct Instruction {
  Operation operation = Operation::load;
  int64_t micro_batch =
      -1;                ///< index into `Plan::micro_batch_sizes`; -1 for the whole logical batch
  int64_t segment = -1;  ///< of the micro-batch's cut tape; -1 for the whole. Of the whole logical
                         ///< batch: the stretch behind an op that sees it
};

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

  bool offloads = false;        ///< what waits at cuts leaves the device
  bool overlaps = false;        ///< and is copied while other micro-batches compute
  int64_t offloaded_bytes = 0;  ///< in the last step that followed it; each time counted
  GraphBytes graph_bytes;       ///< of the graphs among it
  CopySeconds offload_seconds;  ///< of the same step
  /// Of the next one: from what its instructions took, and how fast copies were. Not on
  /// accelerators, which compute behind the instructions.
  std::optional<CopySeconds> predicted_offload_seconds;

  bool computes_whole_loss() const;  ///< on the outputs of all micro-batches
  /// Micro-batches whose graph is kept away from the device.
  int64_t offloaded_graphs() const noexcept { return offloads_graphs ? retained : 0; }
  /// The size of the largest micro-batch.
  int64_t micro_batch_size() const;
  /// For people: what was chosen, what else was possible, what bounds it.
  std::string explain() const;
};

/// Sizes of micro-batches of `size` samples; the last one is smaller where `size` does not divide.
std::vector<int64_t> split_by(int64_t batch_size, int64_t size);

/// As few micro-batches of at most `size` samples as possible, all equal to within one sample.
std::vector<int64_t> split_evenly(int64_t batch_size, int64_t size);

/// `split_by`, or evenly where that leaves a single sample over, which layers that see the whole
/// batch may refuse.
std::vector<int64_t> split_for_cuts(int64_t batch_size, int64_t size);

/// The streaming strategy: micro-batch after micro-batch, forward to backward, then one hand-out.
Plan stream_plan(std::vector<int64_t> micro_batch_sizes, bool penalty);

/// The two passes of a coupled loss. The last `retained` micro-batches keep their graphs, which are
/// consumed first, last to first, so that memory falls as backward goes. With `offloads_graphs`,
/// and `with_offload`, each of them leaves the device after its forward, and comes back for its
/// backward.
Plan two_pass_plan(std::vector<int64_t> micro_batch_sizes, int64_t retained,
                   bool offloads_graphs = false);

/// A micro-batch's tape between ops that see the whole batch: for each such stretch the number of
/// the segment behind its last one. Without cuts for memory that is 1, 2, …
using Stretches = std::vector<int64_t>;

/// A model with ops that see the whole batch: all micro-batches are recorded, then go together from
/// op to op, and back. The first instructions, one `record` each, are the same for any number of
/// segments. With cuts for memory a stretch is played segment by segment: forward, and, for each
/// micro-batch, last first on the way back.
/// \param stretches of each micro-batch's tape; of all as many
/// \param coupled whether the loss is computed on the outputs of all
Plan cut_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<Stretches>& stretches,
              int64_t retained, bool coupled, bool penalty);
/// The same without cuts for memory.
Plan cut_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, int64_t retained,
              bool coupled, bool penalty);

/// `plan`, of tapes that are cut, with what waits away from the device while its micro-batch is not
/// at work. With `overlap` a micro-batch's values come back while the one before it computes, and
/// leave while the one after it does: two frontiers more are on the device at a time. What each
/// instruction does to memory is the same, in another order; so one rehearsal tells both stories.
Plan with_offload(Plan plan, bool overlap);

/// One micro-batch that goes through its cut tape alone: a rehearsal, as `rehearsal_plan`.
Plan cut_rehearsal_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, bool coupled);

/// Micro-batches whose graph does not fit: each is recorded, and then played again segment by
/// segment, last first. How many segments it has, its recording tells. The first instructions of a
/// coupled loss's plan are one `record` each.
/// \param segments of each micro-batch's tape
/// \param coupled  whether the loss is computed on the outputs of all
Plan checkpoint_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<int64_t>& segments,
                     bool coupled, bool penalty);

/// Micro-batches that do both passes one after the other, with a stand-in for the gradient of their
/// outputs: a rehearsal, in which they are measured.
/// \param offloads_graphs their graphs are kept, and offloaded, in place of a second forward
Plan rehearsal_plan(std::vector<int64_t> micro_batch_sizes, bool offloads_graphs = false);

/// What one micro-batch does while it is measured, in order: streaming, or the two passes.
const std::vector<Operation>& stream_operations();
const std::vector<Operation>& two_pass_operations();

}  // namespace infinitybatch
