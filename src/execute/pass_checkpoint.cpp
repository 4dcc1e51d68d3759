// The part of Pass that records micro-batches whose graph would not fit.
#include "core/bits.hpp"
#include "execute/light_recording.hpp"
#include "execute/pass.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace infinitybatch {
namespace {

[[noreturn]] void cannot_cut(const std::string& why) {
  throw Unsupported("forward cannot be cut into segments: " + why +
                    "; leave checkpoint_segments out, or give a larger memory_budget");
}

/// \param why the tape cannot tell what forward did
[[noreturn]] void cannot_tell(const std::string& why) {
  cannot_cut(why +
             "; operators can be cut around (torch.library.custom_op with register_autograd), and "
             "torch.utils.checkpoint around the model's blocks needs no cuts");
}

}  // namespace

Batch Pass::checkpoint(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  tape::FrontierGuide& guide = resources_.checkpoints->guides[rows.size()];
  auto recorded = std::make_shared<Recorded>();
  tape::Frontiers frontiers;
  WaitingRoom kept;
  Batch outputs;
  {
    tape::Recorder recorder(inputs, held_buffers_, devices_);
    recorder.lighten(problem_.device);
    if (resources_.checkpoints->forget || resources_.checkpoints->again)
      guide = tape::FrontierGuide();
    // Until a coupled loss is known the other micro-batches need the room.
    recorder.keep(guide, /*tail=*/problem_.loss.separable() != nullptr,
                  [&](const tape::Frontiers& so_far, int32_t cut) {
                    if (cut < 0) {
                      kept = WaitingRoom();
                      return;
                    }
                    // What waited before is read no more, as a rule: it can leave while forward
                    // goes on.
                    if (strategy_.offloads()) kept.finish_leaving(*resources_.store);
                    for (const auto& [crossing, tensor] : so_far.waiting) {
                      if (crossing.giver == cut) kept[crossing] = tensor;
                    }
                    // It is copied until the next cut. What waits at the last one is used at once,
                    // or leaves when forward is over.
                    const bool more = static_cast<size_t>(cut) + 1 < guide.places.size();
                    if (strategy_.offloads() && more) kept.copy_out(*resources_.store, cut);
                  });
    const Batch given = run_lightly(recorder, forward);
    recorded->tape = recorder.finish(given);
    frontiers = recorder.take_frontiers();
    outputs = given;
  }
  if (recorded->tape.refusal) cannot_cut(*recorded->tape.refusal);
  if (recorded->tape.opaque) cannot_tell(*recorded->tape.opaque);
  std::vector<tape::Cut> cuts;
  resources_.checkpoints->guessed = frontiers.guessed;
  for (const uint32_t op : resources_.checkpoints->choose(recorded->tape)) cuts.push_back({op});
  recorded->segments = tape::cut(recorded->tape, cuts);
  recorded->note_users();
  Part& part = parts_[rows.begin];
  share_found(recorded->tape);
  begin(part, recorded);
  const tape::FrontierGuide followed = std::exchange(
      guide, tape::guide_of(recorded->tape, recorded->segments, std::move(frontiers.program)));
  const bool known = followed == guide && !guide.places.empty();
  if (known && frontiers.complete(recorded->segments)) {
    if (frontiers.tail) part.retained[segments(rows) - 1] = tail_of(*recorded, frontiers, outputs);
    part.waiting = std::move(kept);
    part.differentiable = std::move(frontiers.differentiable);
    for (size_t s = 0; s < frontiers.random.size(); ++s) {
      part.random[s + 1] = std::move(frontiers.random[s]);
    }
    return outputs;
  }
  frontiers = tape::Frontiers();
  kept = WaitingRoom();
  if (resources_.checkpoints->guessed) guide = tape::FrontierGuide();
  // Segments that nobody has replayed yet: the outputs have to come out bit for bit.
  if (problem_.loss.separable() != nullptr)
    to_compare_.insert_or_assign(rows.begin, detached(outputs));
  if (!resources_.checkpoints->forget && !resources_.checkpoints->again) {
    advance_to(rows, inputs, segments(rows) - 1);
  }
  return outputs;
}

/// What playing the last segment would give, from the recording itself.
Pass::Work Pass::tail_of(const Recorded& recorded, tape::Frontiers& frontiers,
                         const Batch& outputs) {
  Work work;
  work.leaves = std::move(frontiers.starts);
  work.histories = std::move(frontiers.histories);
  work.values.resize(recorded.tape.value_count);
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const tape::ValueId value = recorded.tape.result_values[i];
    if (value != tape::kNoValue) work.values[value] = outputs.leaves()[i].tensor;
  }
  return work;
}

void Pass::compare_with_recording(Rows rows, const Batch& outputs) {
  const auto recorded = to_compare_.find(rows.begin);
  if (recorded == to_compare_.end()) return;
  const at::NoGradGuard no_grad;
  if (!differs_.defined()) {
    differs_ = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(problem_.device));
  }
  note_differences(recorded->second, outputs, differs_);
  to_compare_.erase(recorded);
}

void Pass::confirm_replays() const {
  if (!differs_.defined() || !differs_.item<bool>()) return;
  cannot_cut("a replay of it gave other outputs than its recording");
}

}  // namespace infinitybatch
