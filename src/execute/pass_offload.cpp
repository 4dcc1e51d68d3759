// The part of Pass that moves what waits off the device and back.
#include "execute/pass.hpp"
#include "tape/arguments.hpp"

#include <cstdint>

namespace infinitybatch {

Pass::Needs Pass::needs(const Part& part, int64_t segment, bool back) const {
  Needs needs;
  const tape::Segment& here = segment_of(part, segment);
  for (const tape::Take& take : here.takes) {
    needs.waiting.insert(take.from);
    // Gradients of what several segments use are summed up.
    if (back) needs.gradients.insert(take.from);
  }
  if (back) {
    for (const tape::ValueId value : here.gives) {
      needs.gradients.insert({value, static_cast<int32_t>(segment)});
    }
  }
  if (is_last(part, segment) || !has_op_before(part, segment + 1)) return needs;
  // The op behind it is given this before it is combined, and some of it to correct it.
  const tape::Segment& next = segment_of(part, segment + 1);
  size_t left = back ? op_before(part, segment + 1).corrected() : SIZE_MAX;
  tape::for_each_argument(part.recorded->tape, part.recorded->first_op(segment + 1),
                          [&](tape::ValueId value, const tape::Slot&) {
                            if (left == 0) return;
                            --left;
                            for (const tape::Take& take : next.takes) {
                              if (take.from.value != value) continue;
                              needs.waiting.insert(take.from);
                              if (back) needs.gradients.insert(take.from);
                            }
                          });
  return needs;
}

WholeOutputs* Pass::outputs_at(Rows rows, int64_t segment) const {
  if (segment == kWhole || whole_ == nullptr) return whole_;
  return is_last(parts_.at(rows.begin), segment) ? whole_ : nullptr;
}

int64_t Pass::fetch(Rows rows, int64_t segment, bool back, bool ahead) {
  Part& part = parts_.at(rows.begin);
  int64_t bytes = 0;
  if (segment == kWhole) {
    if (part.whole.memory) bytes += part.whole.memory->fetch(ahead);
  } else {
    const Needs needs = this->needs(part, segment, back);
    bytes += part.waiting.fetch(needs.waiting, ahead);
    bytes += part.gradients.fetch(needs.gradients, ahead);
  }
  WholeOutputs* const outputs = back ? outputs_at(rows, segment) : nullptr;
  return bytes + (outputs != nullptr ? outputs->fetch(rows, ahead) : 0);
}

int64_t Pass::leave(Rows rows, int64_t segment) {
  Part& part = parts_.at(rows.begin);
  if (part.whole.memory) {
    return part.whole.memory->start_leaving(*resources_.store, memory_of(seen(rows)));
  }
  const int64_t bytes = part.waiting.start_leaving(*resources_.store) +
                        part.gradients.start_leaving(*resources_.store);
  WholeOutputs* const outputs = outputs_at(rows, segment);
  return bytes + (outputs != nullptr ? outputs->leave(rows) : 0);
}

int64_t Pass::offload(Rows rows, int64_t segment, bool back) {
  const auto found = parts_.find(rows.begin);
  if (found == parts_.end()) return 0;  // nothing of it is used again
  // A micro-batch whose segments follow each other is gone with the last of them.
  WholeOutputs* const outputs = strategy_.per_micro_batch() ? nullptr : outputs_at(rows, segment);
  const int64_t bytes = segment == kWhole
                            ? found->second.whole.memory ? offload_graph(found->second) : 0
                            : offload_values(found->second, rows, segment, back);
  return bytes + (outputs != nullptr ? outputs->offload(rows) : 0);
}

int64_t Pass::offload_values(Part& part, Rows rows, int64_t segment, bool back) {
  const Recorded& recorded = *part.recorded;
  if (segment == (back ? recorded.first_beside(segment) : recorded.last_beside(segment))) {
    return offload(rows);
  }
  if (!back) return keep_for(part, segment + 1, /*back=*/false);
  drop(part, segment);
  return keep_for(part, segment - 1, /*back=*/true);
}

int64_t Pass::offload(Rows rows) {
  Part& part = parts_.at(rows.begin);
  const int64_t bytes = part.waiting.offload(*resources_.store);
  return bytes + part.gradients.offload(*resources_.store);
}

int64_t Pass::keep_for(Part& part, int64_t segment, bool back) {
  const Needs needs = this->needs(part, segment, back);
  const int64_t bytes = part.waiting.offload(*resources_.store, needs.waiting);
  return bytes + part.gradients.offload(*resources_.store, needs.gradients);
}

}  // namespace infinitybatch
