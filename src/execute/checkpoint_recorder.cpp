#include "execute/checkpoint_recorder.hpp"

#include "execute/checkpoints.hpp"
#include "execute/light_recording.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

/// \param why the tape cannot tell what forward did
[[noreturn]] void cannot_tell(const std::string& why) {
  refuse_segments(
      why +
      "; operators can be cut around (torch.library.custom_op with register_autograd), and "
      "torch.utils.checkpoint around the model's blocks needs no cuts");
}

/// What playing the last segment would give, from the recording itself.
PlayedSegment tail_of(const Recorded& recorded, tape::Frontiers& frontiers, const Batch& outputs) {
  PlayedSegment tail;
  tail.leaves = std::move(frontiers.starts);
  tail.histories = std::move(frontiers.histories);
  tail.values.resize(recorded.tape.value_count);
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const tape::ValueId value = recorded.tape.result_values[i];
    if (value != tape::kNoValue) tail.values[value] = outputs.leaves()[i].tensor;
  }
  return tail;
}

}  // namespace

void refuse_segments(const std::string& why) {
  throw Unsupported("forward cannot be cut into segments: " + why +
                    "; leave checkpoint_segments out, or give a larger memory_budget");
}

CheckpointRecorder::Recording CheckpointRecorder::record(Rows rows, const Batch& inputs,
                                                         const std::function<Batch()>& forward) {
  Checkpoints& checkpoints = *model_.resources.checkpoints;
  offload::Store* const store = model_.strategy.offloads() ? model_.resources.store : nullptr;
  const bool separable = model_.problem.loss.separable() != nullptr;
  tape::FrontierGuide& guide = checkpoints.guides[rows.size()];
  if (checkpoints.forget || checkpoints.again) guide = tape::FrontierGuide();
  const auto recorded = std::make_shared<Recorded>();
  recorded->outlives_step = model_.strategy.reuses_tapes;
  tape::Frontiers frontiers;
  WaitingRoom kept;
  Recording made;
  {
    tape::Recorder recorder(inputs, model_.buffers, model_.devices);
    recorder.leave_parameters(model_.parameters);
    recorder.lighten(model_.problem.device);
    // Until a coupled loss is known the other micro-batches need the room.
    recorder.keep(guide, /*tail=*/separable, [&](const tape::Frontiers& so_far, int32_t cut) {
      if (cut < 0) {
        kept = WaitingRoom();
        return;
      }
      // What was saved before is read no more, as a rule: it can leave while forward goes on.
      if (store != nullptr) kept.finish_leaving(*store);
      for (const auto& [crossing, tensor] : so_far.waiting) {
        if (crossing.giver == cut) kept[crossing] = tensor;
      }
      // It is copied until the next cut. What is saved at the last one is used at once, or leaves
      // when forward is over.
      const bool more = static_cast<size_t>(cut) + 1 < guide.places.size();
      if (store != nullptr && more) kept.copy_out(*store, cut);
    });
    const Batch given = run_lightly(recorder, forward);
    recorded->tape = recorder.finish(given);
    frontiers = recorder.take_frontiers();
    made.outputs = given;
  }
  if (recorded->tape.refusal) refuse_segments(*recorded->tape.refusal);
  if (recorded->tape.opaque) cannot_tell(*recorded->tape.opaque);
  std::vector<tape::Cut> cuts;
  checkpoints.guessed = frontiers.guessed;
  for (const uint32_t op : checkpoints.choose(recorded->tape)) cuts.push_back({op});
  recorded->segments = tape::cut(recorded->tape, cuts);
  recorded->note_users();
  const std::shared_ptr<const Recorded> first = first_.lock();
  found_.share(recorded->tape, first ? &first->tape : nullptr);
  if (!first) first_ = recorded;
  made.recorded = recorded;
  const tape::FrontierGuide followed = std::exchange(
      guide, tape::guide_of(recorded->tape, recorded->segments, std::move(frontiers.program)));
  const bool known = followed == guide && !guide.places.empty();
  if (known && frontiers.complete(recorded->segments)) {
    CutMicroBatch::Saved& saved = made.saved.emplace();
    if (frontiers.tail) saved.tail = tail_of(*recorded, frontiers, made.outputs);
    saved.boundaries = {std::move(kept), std::move(frontiers.differentiable)};
    saved.random = std::move(frontiers.random);
  } else if (checkpoints.guessed) {
    guide = tape::FrontierGuide();
  }
  return made;
}

}  // namespace infinitybatch
