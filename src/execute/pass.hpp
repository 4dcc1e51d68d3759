#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/row_range.hpp"
#include "execute/checkpoint_recorder.hpp"
#include "execute/coupled_recorder.hpp"
#include "execute/cut_micro_batch.hpp"
#include "execute/native_numbers.hpp"
#include "execute/output_comparison.hpp"
#include "execute/recorded_model.hpp"
#include "execute/repeatable_forward.hpp"
#include "execute/schedule.hpp"
#include "execute/stand_ins.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

class SeparableShare;
class WholeOutputs;

/// Moves micro-batches forward, segment by segment, and back from a gradient of their outputs that
/// is known later.
///
/// A micro-batch that is not cut is one segment, -1: its graph is used at once, where the loss is
/// separable, or comes of a `RepeatableForward`. Others are recorded first, by `CoupledRecorder`,
/// or each by itself by `CheckpointRecorder`; then they have segments from 0 (`CutMicroBatch`). In
/// front of each stretch of these but the first an op sees the whole batch (`StandIns`): all
/// micro-batches go there (`advance`) before it is computed (`combine`), and back in the same way
/// (`resume`, `backward`, `combine_gradients`). The outputs of second forwards are compared with
/// those that the loss saw (`OutputComparison`).
class Pass {
 public:
  /// \param share of a separable loss; null otherwise
  /// \param whole the outputs of all, of a loss that is computed on them; null otherwise
  Pass(const Setup& setup, autograd::GradientSinks& sinks, BufferRule& buffers,
       SeparableShare* share, WholeOutputs* whole);
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  // Micro-batches that are not cut, of a loss of all outputs:
  /// Runs forward. Returns what the model gave, detached.
  /// \param keep    the graph for `resume`
  /// \param told    gets all that it gave, where somebody reads its recording; may be null
  /// \param forward runs the user's model
  const Batch& first(Rows rows, const Batch& inputs, bool keep, Batch* told,
                     const std::function<Batch()>& forward);
  /// Nobody reads the recording of these rows any more, unless `resume` does.
  void has_told(Rows rows) { uncut_.at(rows.begin).forget_recording(); }
  /// Not by playing its tape: for this reason the user's forward has to run again.
  void run_again(Rows rows, std::string reason) {
    uncut_.at(rows.begin).run_again(std::move(reason));
  }
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

  // Those that are:
  /// See `CoupledRecorder`. Returns the outputs of the recording, detached.
  Batch record(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
               const RecordableForward& forward);
  /// In place of `record`, where an earlier recording can be used. Returns whether there is one.
  bool reuse(Rows rows);
  /// Whether user code has to run beside it first; and that, see `CoupledRecorder::compare`.
  bool compares(Rows rows) const { return coupled_.compares(rows); }
  void compare(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
               const std::function<Batch()>& forward) {
    coupled_.compare(rows, inputs, watch, forward);
  }
  /// With `Strategy::per_micro_batch`, in place of `record`; see `CheckpointRecorder`. The
  /// micro-batch then stands at its last cut. Returns the model's outputs, as forward gave them.
  Batch checkpoint(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);
  /// Takes these rows through a segment to the next cut. Returns the model's outputs where it is
  /// the last one.
  /// \param retain keep the graph for `resume`
  /// \param leave  what is saved in front of the segment goes; see `recompute`
  Batch advance(Rows rows, const Batch& inputs, int64_t segment, bool retain, bool leave);
  /// The op in front of a stretch has seen all rows.
  void combine(int64_t stretch) { ops_.combine(stretch, buffers_); }
  /// Takes these rows through a segment once more, with what is known of ops of the whole batch:
  /// what was saved behind it is again.
  /// \param leave what is saved in front of it goes
  void recompute(Rows rows, const Batch& inputs, int64_t segment, bool leave);
  /// Plays a segment with a graph. Returns the model's outputs where it is the last one.
  Batch resume(Rows rows, const Batch& inputs, int64_t segment);
  /// The op in front of a stretch has seen the gradients of all rows.
  void combine_gradients(int64_t stretch) { ops_.before(stretch).combine_gradients(sinks_); }

  /// How many segments there are without cuts for memory, and with `Strategy::per_micro_batch` in
  /// the first micro-batch's tape; once it is recorded.
  int64_t segments() const;
  /// Of one micro-batch, once it is recorded.
  int64_t segments(Rows rows) const { return cut_.at(rows.begin).segments(); }
  bool is_last(Rows rows, int64_t segment) const {
    return segment == kWhole || cut_.at(rows.begin).is_last(segment);
  }
  /// For each of its stretches: the segment behind its last one.
  Stretches stretches(Rows rows) const;
  /// Whether `advance` or `resume` need the rows of the inputs.
  bool reads_inputs(Rows rows, int64_t segment) const;

  // All of them:
  /// A micro-batch's, once it is recorded.
  const tape::Tape& tape(Rows rows) const;
  const Recorded& recorded(Rows rows) const { return cut_.at(rows.begin).recorded(); }
  /// Graphs of these rows cannot be kept after all (buffers were restored under them).
  void drop_graph(Rows rows);
  /// In front of a backward pass that is not the first, or not the last.
  /// \param keep another one may follow: what is saved stays
  /// \param repeatable it may fail and `begin_again`: ops of the whole batch keep what they know
  void begin_backward(bool keep, bool repeatable);
  /// It has failed half way: micro-batches, which are cut, stand in front of their inputs again.
  void begin_again();
  /// For measuring: stands for the gradient of these outputs where no loss is computed.
  void seed(const Batch& outputs);
  /// Runs the graph at work backward.
  /// \param outputs of the model, where it is the last segment: from their gradient; not where a
  ///                separable loss's share of them is at work
  void backward(Rows rows, int64_t segment, Batch outputs);
  /// Lets go of the graph at work.
  void free();
  /// \throws tape::Mismatch, Unsupported where a second forward gave other outputs than the first.
  /// All of a step is asked at once: a device would be waited for each time.
  void check() const { comparison_.check(replayed_); }

  // With `Strategy::offloads`. Each returns the bytes whose copies begin.
  /// What these rows' `advance` through a segment, or with `back` `resume` and `backward`, need is
  /// on the device again; with `ahead` it begins to come, and is waited for where it is used.
  int64_t restore(Rows rows, int64_t segment, bool back, bool ahead);
  /// What is saved of these rows begins to leave the device.
  int64_t start_offload(Rows rows, int64_t segment);
  /// It has left, but for what the next segment of the same stretch needs; with `back` that is the
  /// one in front of this.
  int64_t finish_offload(Rows rows, int64_t segment, bool back);
  /// All that is saved of these rows, which are cut, has left.
  int64_t offload(Rows rows) { return cut_.at(rows.begin).finish_offload(*resources_.store); }

  /// With `Problem::match_native_rng`, null otherwise: where the whole batch's run has its
  /// generators.
  coupled::RandomStreams* streams() noexcept { return numbers_.streams().get(); }

 private:
  static constexpr int64_t kWhole = -1;

  /// Leaves of the graph at work whose gradients belong here, not to the sinks.
  std::vector<at::Tensor> leaves() const;
  /// Takes the gradients of these.
  void collect(Rows rows, int64_t segment);
  CutMicroBatch& begin(Rows rows, std::shared_ptr<const Recorded> recorded,
                       StaticTapes* lent_by = nullptr);
  /// Whether what is saved in front of a segment is made again from the front of its stretch.
  bool is_made_again(const CutMicroBatch& micro_batch, int64_t segment) const;
  void advance_to(CutMicroBatch& micro_batch, const Batch& inputs, int64_t segment) const;
  int64_t finish_offload(CutMicroBatch& micro_batch, int64_t segment, bool back) const;
  int64_t finish_offload(RepeatableForward& forward);
  /// What others see of these rows' outputs, detached; see `ExternalLoss::take`.
  Batch& seen(Rows rows);
  at::Tensor gradient(Rows rows, size_t leaf, const at::Tensor& output) const;
  /// Of a coupled loss, where these rows' outputs are saved beside a segment; null otherwise.
  WholeOutputs* outputs_beside(Rows rows, int64_t segment) const {
    return is_last(rows, segment) ? whole_ : nullptr;
  }

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  autograd::GradientSinks& sinks_;
  BufferRule& buffers_;
  SeparableShare* share_;
  WholeOutputs* whole_;
  RecordedModel model_;
  NativeNumbers numbers_;
  StandIns ops_;
  CoupledRecorder coupled_;
  CheckpointRecorder checkpoints_;
  OutputComparison comparison_;
  // By first row; one of them is empty.
  std::map<int64_t, RepeatableForward> uncut_;
  std::map<int64_t, CutMicroBatch> cut_;
  PlayedSegment work_;                    // the graph at work
  std::vector<at::Tensor> input_leaves_;  // of it, with an external loss
  std::vector<at::Tensor> seeds_;         // while measuring, in place of the outputs' gradient
  bool replayed_ = false;
  GraphBytes graph_bytes_;
  std::optional<std::string> opaque_;
};

}  // namespace infinitybatch
