#pragma once

#include "core/rng.hpp"
#include "execute/buffer_values.hpp"
#include "execute/graph_memory.hpp"
#include "execute/recorded_model.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch {

/// One micro-batch's forward, not cut, which has to have a graph once the loss of all is known: its
/// graph is kept, on the device or offloaded, or its tape is replayed, or where the tape is opaque
/// the user's forward runs again on the same rows, in the same buffers, under the same random
/// state.
class RepeatableForward {
 public:
  /// \param model must outlive this
  RepeatableForward(const RecordedModel& model, Rows rows) : model_(model), rows_(rows) {}

  Rows rows() const noexcept { return rows_; }

  /// Runs forward for the first time.
  /// \param keep its graph: `keep_graph` follows
  /// \param read somebody reads its recording, until `forget_recording`
  /// \throws Unsupported where no second forward could follow
  Batch first(const Batch& inputs, bool keep, bool read, const std::function<Batch()>& forward);
  const tape::Tape& tape() const noexcept { return tape_; }
  /// Nobody reads the recording any more, unless a second forward plays it.
  void forget_recording();
  /// The second forward runs the user's code, for this reason.
  void run_again(std::string reason) {
    if (!tape_.opaque) tape_.opaque = std::move(reason);
  }

  /// \param inputs of the graph, where its leaves matter to others
  void keep_graph(Batch outputs, Batch inputs);
  bool keeps_graph() const noexcept { return graph_.has_value(); }
  const Batch& inputs_of_graph() const noexcept { return inputs_; }
  void drop_graph();
  /// What it keeps has been written.
  void drop_spoilt_graph();
  /// The outputs, with the graph that was kept; it is kept no more.
  Batch take_graph();

  /// Whether the second forward plays the tape.
  bool replays() const { return model_.strategy.replays() && !tape_.opaque; }
  /// Why it does not; nothing where that is not known yet.
  const std::optional<std::string>& opaque() const noexcept { return tape_.opaque; }
  /// Outputs with a graph, by a second forward.
  Batch second(const Batch& inputs, const std::function<Batch()>& forward);

  // With `Strategy::offloads_graphs`, of a graph that is kept:
  bool offloads_graph() const noexcept { return memory_.has_value(); }
  /// Each returns the bytes whose copies begin.
  int64_t restore_graph(bool ahead) { return memory_ ? memory_->fetch(ahead) : 0; }
  /// \param seen what others see of the outputs, detached
  int64_t start_offload(const Batch& seen);
  int64_t finish_offload(Batch& seen);
  /// What has left the device, and what could not.
  GraphBytes graph_bytes() const { return memory_ ? memory_->bytes() : GraphBytes(); }

 private:
  Batch run_second(const std::function<Batch()>& forward) const;
  void forget_second_forward();

  const RecordedModel& model_;
  Rows rows_;
  RngSnapshot random_;
  std::shared_ptr<const BufferValues> buffers_;  // where one micro-batch's carry on into the next
  tape::Tape tape_;
  bool recorded_ = false;              // `tape_` is of a recording
  bool again_ = true;                  // a second forward may follow
  std::optional<GraphMemory> memory_;  // of a graph that is offloaded; outlives it
  std::optional<Batch> graph_;         // the outputs, with their graph
  Batch inputs_;                       // of the graph
};

}  // namespace infinitybatch
