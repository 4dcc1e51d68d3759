#pragma once

#include "coupled/coupling_watch.hpp"
#include "execute/found_values.hpp"
#include "execute/native_numbers.hpp"
#include "execute/recorded_model.hpp"
#include "execute/stand_ins.hpp"

#include <functional>
#include <memory>

namespace infinitybatch {

class BufferRule;

/// The user's model on the rows at work, for a recorder.
struct RecordableForward {
  using Run = std::function<void(const Batch& inputs, const std::function<Batch()>& forward)>;
  std::function<Batch()> once;
  /// For a check, which does not count: it finds in Python what `once` did.
  std::function<Batch()> again;
  /// Calls `run` with other rows' inputs, and with what runs the model on them.
  std::function<void(Rows rows, const Run& run)> elsewhere;
};

/// Records micro-batches of a model whose ops see the whole batch, and cuts their tapes in front of
/// each. A recording is provisional, for statistics are not known yet: what forward does must not
/// depend on what these ops gave, which is checked on the first one.
class CoupledRecorder {
 public:
  /// \param model, buffers, numbers, ops must outlive this
  CoupledRecorder(const RecordedModel& model, BufferRule& buffers, NativeNumbers& numbers,
                  StandIns& ops)
      : model_(model), buffers_(buffers), numbers_(numbers), ops_(ops) {}

  struct Recording {
    std::shared_ptr<const Recorded> recorded;
    Batch outputs;  ///< detached; wrong in what comes of ops of the whole batch
  };
  /// \param watch has seen what `forward` ran
  /// \throws CouplingError where ops of the whole batch cannot be told apart from the recording
  /// \throws Unsupported with `Strategy::reuses_tapes` where forward is not the same program each
  ///         time
  /// \throws NothingToCut with an external loss where no op sees the whole batch
  Recording record(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                   const RecordableForward& forward);

  /// With `Strategy::reuses_tapes`: an earlier recording of as many rows, where one is confirmed;
  /// null otherwise.
  std::shared_ptr<const Recorded> reuse(Rows rows);
  /// Whether user code has to run beside that recording; see `StaticTapes::due`.
  bool compares(Rows rows) const;
  /// Records `forward` beside it, and forgets what is known where it is another program.
  /// \throws Unsupported where steps have used it that nobody compared
  void compare(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
               const std::function<Batch()>& forward);

 private:
  /// \throws CouplingError or Unsupported where a buffer was written by what is no op
  void check_writes(const tape::Tape& tape, const coupled::CouplingWatch& watch) const;
  tape::Tape record_tape(const Batch& inputs, coupled::CouplingWatch& watch,
                         const std::function<Batch()>& forward, bool disturbed, Batch* outputs);
  /// The program of another recording, with the ops of the whole batch disturbed.
  tape::Tape disturbed(const Batch& inputs, coupled::CouplingWatch& watch,
                       const RecordableForward& forward, const RngSnapshot& before);
  /// Whether forward is the same program when these ops give something else.
  /// \return false where it was not, for its first call made what later ones find
  /// \throws CouplingError where it is not
  bool same_when_disturbed(const tape::Tape& whole, const Batch& inputs,
                           coupled::CouplingWatch& watch, const RecordableForward& forward,
                           const RngSnapshot& before);
  void cut(Recorded& recorded) const;
  void check_replay(const Recorded& recorded, Rows rows, const Batch& inputs,
                    const Batch& outputs) const;
  void learn_draws(Rows rows, const Batch& inputs, const tape::Tape& tape,
                   coupled::CouplingWatch& watch, const RecordableForward& forward);

  const RecordedModel& model_;
  BufferRule& buffers_;
  NativeNumbers& numbers_;
  StandIns& ops_;
  FoundValues found_;
  bool checked_ = false;
  bool warm_ = false;  // the first recording was thrown away
};

}  // namespace infinitybatch
