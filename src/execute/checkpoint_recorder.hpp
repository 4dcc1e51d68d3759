#pragma once

#include "execute/cut_micro_batch.hpp"
#include "execute/found_values.hpp"
#include "execute/recorded_model.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch {

/// \throws Unsupported always: why forward cannot be cut into segments, and what else can be done
[[noreturn]] void refuse_segments(const std::string& why);

/// Records micro-batches whose graph would not fit, and cuts their tapes where `Checkpoints` say.
/// Where a recording before had the same program, what it told is used: boundary activations are
/// saved while forward runs.
class CheckpointRecorder {
 public:
  /// \param model must outlive this
  explicit CheckpointRecorder(const RecordedModel& model) : model_(model) {}

  struct Recording {
    std::shared_ptr<const Recorded> recorded;
    Batch outputs;  ///< as forward gave them; nobody can run backward from them
    /// Where the cuts were known before; with a separable loss the last segment's graph too.
    std::optional<CutMicroBatch::Saved> saved;
  };
  /// \throws Unsupported where forward cannot be cut
  Recording record(Rows rows, const Batch& inputs, const std::function<Batch()>& forward);

 private:
  const RecordedModel& model_;
  FoundValues found_;
  std::weak_ptr<const Recorded> first_;  // of those that are still needed
};

}  // namespace infinitybatch
