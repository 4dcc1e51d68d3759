#pragma once

#include "tape/tape.hpp"

namespace infinitybatch::tape {

/// Calls `visit(value, slot)` with the place of each value that `op` reads or writes.
template <typename AnyTape, typename Visit>
void for_each_argument(AnyTape& tape, const Op& op, Visit&& visit) {
  for (uint32_t s = op.slots.begin; s < op.slots.end; ++s) {
    const Slot& slot = tape.slots[s];
    if (slot.kind == Slot::Kind::tensor) {
      visit(slot.first, slot);
      continue;
    }
    for (uint32_t i = 0; i < slot.count; ++i) {
      const ValueId element = tape.elements[slot.first + i];
      if (element != kNoValue) visit(element, slot);
    }
  }
}

}  // namespace infinitybatch::tape
