#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/rng.hpp"
#include "core/row_range.hpp"
#include "coupled/coupling_watch.hpp"
#include "coupled/random_streams.hpp"
#include "coupled/whole_batch_op.hpp"
#include "execute/buffer_rule.hpp"
#include "execute/buffer_values.hpp"
#include "execute/checkpoints.hpp"
#include "execute/graph_memory.hpp"
#include "execute/recorded.hpp"
#include "execute/schedule.hpp"
#include "execute/setup.hpp"
#include "execute/waiting_room.hpp"
#include "execute/whole_outputs.hpp"
#include "tape/segment.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace infinitybatch {

/// Micro-batches that are recorded forward, and go backward from a gradient of their outputs that
/// is known later: by a graph that is kept, or by their tape, which is played again as a whole or
/// segment by segment.
///
/// A tape that is not cut is one segment, -1. In between its graph is kept (`keep`), or its tape is
/// replayed, or where the tape is opaque the user's forward runs again on the same rows under the
/// same random state. Each second forward's outputs are compared bit for bit with those that the
/// loss saw; the result is asked for once, by `check`.
///
/// Of a model whose ops see the whole batch the recording is provisional: statistics are not known
/// yet. Its tape is cut in front of each such op. Then all micro-batches go from cut to cut
/// together
/// (`advance`, `combine`), and backward in the same way, last segment first (`resume`, `backward`,
/// `combine_gradients`).
///
/// Segments are numbered from 0; all but the first begin with an op of the whole batch or, with
/// `Strategy::checkpoints`, where little waits: `Recorded::stretches` tells which. What waits at
/// cuts for memory is there for one micro-batch at a time: it is let go of on the way forward, and
/// made again from what waits in front of the stretch. What waits at the cuts, detached, and the
/// gradients of it, lie on the model's device or, with `Strategy::offloads`, there.
class Pass {
 public:
  /// \param whole the outputs of all, of a loss that is computed on them; null otherwise
  Pass(const Setup& setup, autograd::GradientSinks& sinks, BufferRule& buffers,
       WholeOutputs* whole);

  // Of tapes that are not cut:
  /// Runs forward. Returns what the model gave, detached.
  /// \param keep    the graph for `resume`
  /// \param told    gets all that it gave, where somebody reads its recording; may be null
  /// \param forward runs the user's model
  const Batch& first(Rows rows, const Batch& inputs, bool keep, Batch* told,
                     const std::function<Batch()>& forward);
  /// Nobody reads the recording of these rows any more, unless `resume` does.
  void has_told(Rows rows) { forget_recording(parts_.at(rows.begin)); }
  /// Not by playing its tape: for this reason the user's forward has to run again.
  void run_again(Rows rows, std::string reason);
  /// Outputs of these rows with a graph.
  Batch resume(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);
  /// Those of all rows. Returns whether there were any.
  bool drop_graphs();
  int64_t kept_graphs() const;
  /// Whether graphs of earlier rows are kept.
  bool keeps_graph_before(Rows rows) const;
  /// The inputs that the graph of these rows leads to; null where it is not kept.
  const Batch* inputs_of_graph(Rows rows) const;
  /// Of those that are kept now.
  GraphBytes kept_graph_bytes() const;
  /// Of all graphs that were offloaded.
  const GraphBytes& graph_bytes() const noexcept { return graph_bytes_; }
  /// Why the user's forward ran twice; nothing where it did not.
  const std::optional<std::string>& opaque() const noexcept { return opaque_; }
  /// Why it will, for the first rows of which it has to; nothing where it need not.
  std::optional<std::string> will_run_again() const;
  /// Whether a tape was played since backward began.
  bool replayed() const noexcept { return replayed_; }

  // Of those that are:

  /// \param watch   has seen what `forward` ran
  /// \param forward runs the user's model; twice with `Findings::recordings_checked`
  /// \throws CouplingError where the ops of the whole batch cannot be told apart from the recording
  /// \throws Unsupported with `Strategy::reuses_tapes` where forward is not the same program each
  /// time
  /// \param elsewhere calls back with other rows' inputs, and with what runs the model on them
  using Run = std::function<void(const Batch& inputs, const std::function<Batch()>& forward)>;
  using Elsewhere = std::function<void(Rows rows, const Run& run)>;
  struct Forward {
    std::function<Batch()> once;
    /// For the check, which does not count; whether it finds the numbers in Python that `once` did.
    std::function<Batch(bool as_first)> again;
    /// By experiment: whether it gives other outputs from what it leaves in Python.
    std::function<bool()> depends_on_state;
  };
  /// \return the outputs of the recording, detached; what comes of ops of the whole batch is wrong
  ///         in them
  Batch record(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
               const Forward& forward, const Elsewhere& elsewhere);
  /// With `Strategy::per_micro_batch`, in place of `record`: records a micro-batch and cuts its
  /// tape where they say. Afterwards it stands at its last cut; where the cuts were known before
  /// and the loss is separable, the graph behind it is kept from the recording. Returns the model's
  /// outputs, as forward gave them; nobody can run backward from them.
  /// \throws Unsupported where forward cannot be cut
  Batch checkpoint(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);
  /// Graphs of these rows cannot be kept after all (buffers were restored under them).
  void drop_graph(Rows rows);
  /// Takes these rows from the beginning of its stretch to the cut in front of a segment. With
  /// `Checkpoints::forget` only what this segment needs waits there then.
  void advance_to(Rows rows, const Batch& inputs, int64_t segment);
  /// With `Strategy::reuses_tapes`: uses an earlier recording of as many rows instead, where one is
  /// confirmed. Random numbers come from a stream of these rows' own.
  bool reuse(Rows rows);
  /// How many segments there are without cuts for memory, and with `Strategy::per_micro_batch` in
  /// the first micro-batch's tape; after the first `record`.
  int64_t segments() const;
  /// One micro-batch's, once it is recorded.
  const tape::Tape& tape(Rows rows) const {
    const Part& part = parts_.at(rows.begin);
    return part.recorded ? part.recorded->tape : part.whole.tape;
  }
  /// Of one micro-batch's tape, once it is recorded.
  int64_t segments(Rows rows) const;
  /// The same for each of its stretches: the segment behind its last one.
  Stretches stretches(Rows rows) const;

  /// Whether `advance` or `resume` need the rows of the inputs.
  bool reads_inputs(Rows rows, int64_t segment) const;

  /// Takes these rows through a segment to the next cut. Returns the model's outputs where it is
  /// the last one.
  /// \param retain keep the graph for `resume`
  Batch advance(Rows rows, const Batch& inputs, int64_t segment, bool retain);
  /// The op in front of a stretch has seen all rows.
  void combine(int64_t stretch);

  /// In front of a backward pass that is not the first, or not the last.
  /// \param keep another one may follow: what waits goes on waiting
  void begin_backward(bool keep);
  /// Plays a segment with a graph. Returns the model's outputs where it is the last one.
  Batch resume(Rows rows, const Batch& inputs, int64_t segment);
  /// Leaves of the graph at work whose gradients belong here, not to the sinks.
  std::vector<at::Tensor> leaves() const;
  /// For measuring: stands for the gradient of these outputs where no loss is computed.
  void seed(const Batch& outputs) { seeds_ = stand_in_gradients(outputs); }
  /// Runs the graph at work backward.
  /// \param outputs of the model, where it is the last segment: from their gradient
  void backward(Rows rows, int64_t segment, Batch outputs);
  /// Notes where the outputs of a second forward differ from those that the loss saw.
  void compare(Rows rows, const Batch& outputs);
  /// Takes the gradients of `leaves`. `backward` does it by itself.
  void collect(Rows rows, int64_t segment);
  /// The op in front of a stretch has seen the gradients of all rows.
  void combine_gradients(int64_t stretch);
  /// Lets go of the graph at work.
  void free();
  /// \throws tape::Mismatch, Unsupported where a second forward gave other outputs than the first.
  /// All of a step is asked at once: a device would be waited for each time.
  void check() const;

  /// With `Strategy::offloads`: what these rows' `advance` through a segment, or with `back`
  /// `resume` and `backward`, need of what waits is on the device again; with `ahead` it begins to
  /// come, and is waited for where it is used. Returns the bytes whose copies begin, as the next
  /// two do.
  int64_t fetch(Rows rows, int64_t segment, bool back, bool ahead);
  /// With `Strategy::offloads`: what waits of these rows begins to leave the device.
  int64_t leave(Rows rows, int64_t segment);
  /// It has left, but for what the next segment of the same stretch needs; with `back` that is the
  /// one in front of this.
  int64_t offload(Rows rows, int64_t segment, bool back);
  /// All that waits of these rows has left.
  int64_t offload(Rows rows);

  /// With `Problem::match_native_rng`, null otherwise: where the whole batch's run has its
  /// generators.
  coupled::RandomStreams* streams() noexcept { return streams_.get(); }

 private:
  /// A segment that was played, with its graph.
  struct Work {
    std::vector<std::pair<tape::Crossing, at::Tensor>> leaves;
    std::vector<at::Tensor> op_leaves;
    std::vector<at::Tensor> values;
    std::shared_ptr<const void> histories;  // see `tape::Frontiers::histories`
    Batch outputs;                          // of a tape that is not cut, in place of values
  };
  /// What a second forward takes, of a tape that is not cut.
  struct Whole {
    RngSnapshot random;
    std::shared_ptr<const BufferValues> buffers;  // where one micro-batch's carry on into the next
    tape::Tape tape;
    bool recorded = false;              // `tape` is of a recording
    bool again = true;                  // a second forward may follow
    Batch inputs;                       // of the graph, where its leaves matter to others
    std::optional<GraphMemory> memory;  // of a graph that is offloaded

    void forget() {
      tape = {};
      random = {};
      buffers.reset();
    }
  };
  struct Part {
    std::shared_ptr<const Recorded> recorded;
    std::vector<std::vector<tape::Draw>> random;  // in front of each segment
    WaitingRoom waiting;                          // detached
    std::set<tape::Crossing> differentiable;
    WaitingRoom gradients;
    std::map<int64_t, Work> retained;  // by segment
    bool reused = false;               // `recorded` is that of other rows
    Rows rows;
    Whole whole;
    bool keeps_whole_graph() const { return retained.contains(kWhole); }
  };
  static constexpr int64_t kWhole = -1;

  void forget_recording(Part& part) const;
  int64_t offload_graph(Part& part);
  int64_t offload_values(Part& part, Rows rows, int64_t segment, bool back);
  /// Whether a second forward of these rows plays their tape.
  bool replays(const Part& part) const { return strategy_.replays() && !part.whole.tape.opaque; }
  const char* why_no_tapes() const;
  /// What others see of these rows' outputs, detached; see `ExternalLoss::take`.
  Batch& seen(Rows rows);
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output);
  /// Of a coupled loss: where these rows' outputs wait; null where none wait in front of or behind
  /// this segment.
  WholeOutputs* outputs_at(Rows rows, int64_t segment) const;
  void confirm_replays() const;

  /// The program of another recording, with the ops of the whole batch disturbed.
  tape::Tape disturbed(const Batch& inputs, coupled::CouplingWatch& watch, const Forward& forward,
                       const RngSnapshot& before, bool as_first);
  tape::Tape record_tape(const Batch& inputs, coupled::CouplingWatch& watch,
                         const std::function<Batch()>& forward, bool disturbed, Batch* outputs);
  Batch record_anew(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                    const Forward& forward, const Elsewhere& elsewhere);
  void begin(Part& part, std::shared_ptr<const Recorded> recorded);
  bool draws(const coupled::CouplingWatch& watch) const;
  void rewind_random() const;
  void meet_random(const tape::Tape& tape);
  void shift_random();
  void learn_draws(Rows rows, const Batch& inputs, const tape::Tape& tape,
                   coupled::CouplingWatch& watch, const Elsewhere& elsewhere);
  void confirm(Rows rows, const std::shared_ptr<const Recorded>& recorded);
  void distrust();
  bool rebinds_buffers() const;
  void meet_written(const Part& part, int64_t segment, const Work& work);
  void check_replay(const Part& part, Rows rows, const Batch& inputs, const Batch& outputs);
  Batch replay_lightly(const Recorded& recorded, Rows rows, const Batch& inputs);
  static Work tail_of(const Recorded& recorded, tape::Frontiers& frontiers, const Batch& outputs);
  void compare_with_recording(Rows rows, const Batch& outputs);
  void share_found(tape::Tape& tape);
  void agree(const Part& part);
  Work play(Part& part, Rows rows, const Batch& inputs, int64_t segment,
            std::vector<tape::Draw>& random);
  /// What waits in front of a segment, by value. \param op_only what its first op is given
  std::vector<at::Tensor> frontier(Part& part, const tape::Segment& segment,
                                   bool op_only = false) const;
  struct Needs {
    std::set<tape::Crossing> waiting;
    std::set<tape::Crossing> gradients;
  };
  Needs needs(const Part& part, int64_t segment, bool back) const;
  void keep(Part& part, int64_t segment, const Work& work, bool inside = false) const;
  Work go_through(Part& part, Rows rows, const Batch& inputs, int64_t segment, bool inside);
  static void let_go(Part& part, int64_t segment);
  void correct(Part& part, Rows rows, const Batch& inputs, int64_t segment);
  void correct_leaf(Part& part, Rows rows, const Batch& inputs, int64_t segment, size_t which,
                    tape::ValueId value);
  coupled::WholeBatchOp& op_before_stretch(int64_t stretch) const {
    return *ops_[static_cast<size_t>(stretch) - 1];
  }
  coupled::WholeBatchOp& op_before(const Part& part, int64_t segment) const {
    return op_before_stretch(part.recorded->stretch_of(segment));
  }
  /// Whether a segment begins with an op of the whole batch.
  static bool has_op_before(const Part& part, int64_t segment) {
    return segment > 0 && part.recorded->begins_stretch(segment);
  }
  /// Whether what waits in front of a segment is made again from the front of its stretch.
  bool is_made_again(const Part& part, int64_t segment) const;
  /// Whether a micro-batch's graph may be more than fits, so that recordings do without.
  bool records_lightly() const { return strategy_.offloads() || strategy_.checkpoints(); }
  void drop(Part& part, int64_t segment);
  static bool is_last(const Part& part, int64_t segment) {
    return segment + 1 == static_cast<int64_t>(part.recorded->segments.size());
  }
  /// What waits leaves the device, but for what this segment needs.
  int64_t keep_for(Part& part, int64_t segment, bool back);
  static const tape::Segment& segment_of(const Part& part, int64_t segment) {
    return part.recorded->segments[static_cast<size_t>(segment)];
  }

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  autograd::GradientSinks& sinks_;
  BufferRule& buffers_;
  WholeOutputs* whole_;
  std::vector<at::Tensor> held_buffers_;
  std::vector<at::Device> devices_;
  std::map<int64_t, Part> parts_;                            // by first row
  std::vector<std::unique_ptr<coupled::WholeBatchOp>> ops_;  // in front of segments 1, 2, …
  coupled::SettledBuffers settled_;
  bool checked_ = false;
  bool warm_ = false;                    // the first recording was thrown away, see `record_anew`
  std::map<int64_t, Batch> to_compare_;  // outputs of recordings that no replay confirmed yet
  at::Tensor differs_;                   // what `confirm_replays` reads
  std::shared_ptr<coupled::RandomStreams> streams_;
  std::optional<RngSnapshot> foreign_;  // Python's and NumPy's numbers, as the step found them
  std::map<std::string, std::string> foreign_before_;
  std::optional<std::map<std::string, std::string>> foreign_after_;  // one forward
  Work work_;
  std::vector<at::Tensor> seeds_;  // while measuring, in place of the outputs' gradient
  bool replayed_ = false;
  GraphBytes graph_bytes_;
  std::optional<std::string> opaque_;
  std::vector<at::Tensor> input_leaves_;             // of the graph at work, with an external loss
  bool keep_ = false;                                // what waits, for another backward pass
  std::map<const void*, at::Tensor> found_buffers_;  // their values, by tensor
};

}  // namespace infinitybatch
