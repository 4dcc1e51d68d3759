// The part of CutPass that records micro-batches whose graph would not fit.
#include <infinitybatch/execute/cut_pass.hpp>

#include <infinitybatch/core/bits.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace infinitybatch {
namespace {

[[noreturn]] void cannot_cut(const std::string& why) {
  throw Unsupported(
      "one sample's activations do not fit into the budget, and forward cannot be cut "
      "into segments: " +
      why + "; give a larger memory_budget");
}

}  // namespace

Batch CutPass::checkpoint(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  tape::FrontierGuide& guide = job_.checkpoints->guides[rows.size()];
  auto recorded = std::make_shared<Recorded>();
  tape::Frontiers frontiers;
  WaitingRoom kept;
  Batch outputs;
  {
    tape::Recorder recorder(inputs, held_buffers_, devices_);
    recorder.lighten(job_.device);
    recorder.keep(guide, [&](const tape::Frontiers& so_far, int32_t cut) {
      // What waited before is read no more, as a rule: it can leave while forward goes on.
      if (job_.store != nullptr) kept.park(*job_.store);
      for (const auto& [crossing, tensor] : so_far.waiting) {
        if (crossing.giver == cut) kept[crossing] = tensor;
      }
    });
    const Batch given = recorder.run(forward);
    recorded->tape = recorder.finish(given);
    frontiers = recorder.take_frontiers();
    outputs = detached(given);
  }
  if (recorded->tape.refusal) cannot_cut(*recorded->tape.refusal);
  if (recorded->tape.opaque) cannot_cut(*recorded->tape.opaque);
  std::vector<tape::Cut> cuts;
  for (const uint32_t op : job_.checkpoints->choose(recorded->tape)) cuts.push_back({op});
  recorded->segments = tape::cut(recorded->tape, cuts);
  recorded->note_users();
  Part& part = parts_[rows.begin];
  part_ = &part;
  begin(part, recorded);
  const bool known = !guide.places.empty();
  guide = tape::guide_of(recorded->tape, recorded->segments);
  if (known && frontiers.complete(recorded->segments)) {
    part.waiting = std::move(kept);
    part.differentiable = std::move(frontiers.differentiable);
    for (size_t s = 0; s < frontiers.random.size(); ++s) {
      part.random[s + 1] = std::move(frontiers.random[s]);
    }
    return outputs;
  }
  // Segments that nobody has replayed yet: the outputs have to come out bit for bit.
  to_compare_.insert_or_assign(rows.begin, outputs);
  advance_to_last_cut(rows, inputs);
  return outputs;
}

void CutPass::compare(Rows rows, const Batch& outputs) {
  const auto recorded = to_compare_.find(rows.begin);
  if (recorded == to_compare_.end()) return;
  const at::NoGradGuard no_grad;
  at::Tensor differs = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(job_.device));
  note_differences(recorded->second, outputs, differs);
  to_compare_.erase(recorded);
  if (differs.item<bool>()) cannot_cut("a replay of it gave other outputs than its recording");
}

void CutPass::advance_to_last_cut(Rows rows, const Batch& inputs) {
  for (int64_t s = 0; s + 1 < segments(rows); ++s) {
    advance(rows, inputs, s, /*retain=*/false);
    free();
  }
}

}  // namespace infinitybatch
