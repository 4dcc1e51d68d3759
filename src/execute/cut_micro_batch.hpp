#pragma once

#include "core/row_range.hpp"
#include "execute/boundary_activations.hpp"
#include "execute/recorded.hpp"
#include "execute/stand_ins.hpp"
#include "tape/frontiers.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace infinitybatch {

class BufferRule;
struct StaticTapes;

/// A segment that was played, with its graph.
struct PlayedSegment {
  std::vector<std::pair<tape::Crossing, at::Tensor>> leaves;  ///< in place of what it takes
  std::vector<at::Tensor> op_leaves;                          ///< of the stand-in for its first op
  std::vector<at::Tensor> values;
  std::shared_ptr<const void> histories;  ///< see `tape::Frontiers::histories`
};

/// One micro-batch on its way through the segments of its tape, forward and back: what it has saved
/// at the cuts, and where its random numbers stand in front of each segment. `Recorded` tells what
/// segments and stretches are.
class CutMicroBatch {
 public:
  /// \param ops     stand in where stretches begin; null where ops run as they were recorded
  /// \param lent_by where `recorded` is another micro-batch's: told when it cannot be used again.
  ///                Random numbers then come from a stream of these rows' own
  CutMicroBatch(Rows rows, std::shared_ptr<const Recorded> recorded, StandIns* ops,
                StaticTapes* lent_by = nullptr);

  /// What its recording itself has saved at the cuts.
  struct Saved {
    BoundaryActivations boundaries;
    std::vector<std::vector<tape::Draw>> random;  ///< behind each cut
    std::optional<PlayedSegment> tail;            ///< the last segment's graph
  };
  /// It stands at its last cut.
  void stand_at(Saved saved);

  const Recorded& recorded() const noexcept { return *recorded_; }
  int64_t segments() const { return static_cast<int64_t>(recorded_->segments.size()); }
  bool is_last(int64_t segment) const { return segment + 1 == segments(); }
  /// Whether segments `first` to `last`, or the op behind them, read the inputs.
  bool reads_inputs(int64_t first, int64_t last) const;

  // It stands at cuts: there everything is saved that segments behind one need, of those that have
  // yet to go back. At first it stands in front of segment 0.

  // Forward, and, where it does not stand at a cut, forward once more on the way back:
  /// Plays a segment, and stands at the cut behind it.
  /// \throws tape::OtherValues where values decide what forward does, see `lent_by`
  PlayedSegment go_through(const Batch& inputs, int64_t segment);
  /// Stands in front of a segment no longer.
  void leave(int64_t segment);
  /// From the beginning of its stretch to the cut in front of a segment.
  /// \param forget it stands nowhere between
  /// \param store  where all but what the segment takes is offloaded to; null: nowhere
  void advance_to(const Batch& inputs, int64_t segment, bool forget, offload::Store* store);
  /// Gives the op behind a segment what it is called with.
  void give_op_behind(const Batch& inputs, int64_t segment);
  /// What a buffer would hold now, without user code that writes it.
  void tell_written(int64_t segment, const PlayedSegment& played, BufferRule& buffers) const;

  // Graphs that were kept on the way:
  void keep_graph(int64_t segment, PlayedSegment played) {
    graphs_.insert_or_assign(segment, std::move(played));
  }
  bool keeps_graph(int64_t segment) const { return graphs_.contains(segment); }
  void drop_graphs() { graphs_.clear(); }

  // Back:
  /// \param keep another backward may follow: where it stands now, it stands then
  void begin_backward(bool keep);
  /// A backward pass that failed half way is to begin once more, from the inputs.
  void begin_again();
  /// The graph of a segment: the one that was kept, or by playing it.
  PlayedSegment graph_of(const Batch& inputs, int64_t segment);
  /// What the op behind a segment adds to the gradients of its arguments, now that it knows those
  /// of all rows.
  /// \param played the segment
  void correct_behind(const Batch& inputs, int64_t segment, const PlayedSegment& played,
                      autograd::GradientSinks& sinks);
  /// Where backward of a segment begins, beside the model's outputs.
  void take_gradients(int64_t segment, const PlayedSegment& played, std::vector<at::Tensor>& roots,
                      std::vector<at::Tensor>& gradients);
  /// Takes the gradients of a segment's leaves, which has run backward.
  /// It has gone back, unless another backward may follow.
  void collect(int64_t segment, PlayedSegment& played);

  // Offload of what is saved. Each returns the bytes whose copies begin.
  /// What a segment takes, on its way forward or back, is on the device again; with `ahead` its
  /// copies begin.
  int64_t restore(int64_t segment, bool back, bool ahead) {
    return boundaries_.restore(taken(segment, back), ahead);
  }
  int64_t start_offload(offload::Store& store) { return boundaries_.start_offload(store); }
  int64_t finish_offload(offload::Store& store) { return boundaries_.finish_offload(store); }
  /// All is offloaded but what a segment takes.
  int64_t offload_but_for(offload::Store& store, int64_t segment, bool back) {
    return boundaries_.finish_offload(store, taken(segment, back));
  }

 private:
  const tape::Segment& at(int64_t segment) const {
    return recorded_->segments[static_cast<size_t>(segment)];
  }
  /// The op that a segment begins with, where it is one of the whole batch; null otherwise.
  coupled::WholeBatchOp* op_before(int64_t segment) const;
  coupled::WholeBatchOp* op_behind(int64_t segment) const {
    return is_last(segment) ? nullptr : op_before(segment + 1);
  }
  BoundaryActivations::Some taken(int64_t segment, bool back) const;
  bool is_needed(tape::Crossing crossing) const;
  void forget_unneeded();
  /// What a segment takes, by value. \param op_only what its first op is called with
  std::vector<at::Tensor> frontier(const tape::Segment& segment, bool op_only = false);
  PlayedSegment play(const Batch& inputs, int64_t segment, std::vector<tape::Draw>& random);
  void play_values(const Batch& inputs, int64_t segment, PlayedSegment& played,
                   std::vector<tape::Draw>& random) const;
  void correct_leaf(const Batch& inputs, int64_t segment, size_t which, tape::ValueId value,
                    autograd::GradientSinks& sinks);

  Rows rows_;
  std::shared_ptr<const Recorded> recorded_;
  StandIns* ops_;
  StaticTapes* lent_by_;
  std::vector<std::vector<tape::Draw>> random_;  // in front of each segment
  BoundaryActivations boundaries_;
  std::set<int64_t> standing_;                // in front of these segments
  std::optional<std::set<int64_t>> lasting_;  // where it stays, for another backward
  int64_t to_go_back_;                        // segments that have yet to
  std::map<int64_t, PlayedSegment> graphs_;   // by segment
};

}  // namespace infinitybatch
