#include "execute/static_tapes.hpp"

#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <string>

namespace infinitybatch {
namespace {

/// Whether nothing in it has to be met by user code in every step.
bool runs_alone(const tape::Tape& tape) {
  const bool calls_user = std::any_of(tape.ops.begin(), tape.ops.end(), [](const tape::Op& op) {
    return op.facts != nullptr && op.facts->name() == "infinitybatch::across_batch";
  });
  // Nor does a recording know where a generator of the user's stands in the next step.
  const bool draws_from_users = std::any_of(tape.draws.begin(), tape.draws.end(),
                                            [](const tape::Draw& draw) { return draw.passed; });
  // Nor would it scale the rows that other samples look up.
  return !calls_user && !draws_from_users && !tape.scales_rows;
}

}  // namespace

std::shared_ptr<const Recorded> StaticTapes::confirmed(int64_t rows) const {
  const auto entry = by_rows.find(rows);
  if (*varies || entry == by_rows.end() || !entry->second.confirmed) return nullptr;
  return entry->second.recorded;
}

void StaticTapes::meet(int64_t rows, const Recorded& recorded) {
  if (*varies) return;
  Entry& entry = by_rows[rows];
  if (!entry.recorded) {
    const auto kept = std::make_shared<Recorded>(recorded);
    for (tape::External& external : kept->tape.externals.own()) {
      external.version.reset();  // parameters change from step to step
    }
    entry.recorded = kept;
    return;
  }
  if (const auto found = tape::difference(entry.recorded->tape, recorded.tape)) {
    throw Unsupported(
        "static_graph says that forward is the same program for each micro-batch of " +
        std::to_string(rows) + " samples, but two of them differ: " + *found +
        "; leave static_graph out");
  }
  if (!tape::same_witnesses(entry.recorded->tape, recorded.tape)) return distrust();
  entry.confirmed = runs_alone(recorded.tape);
}

void StaticTapes::distrust() {
  *varies = true;
  by_rows.clear();
}

}  // namespace infinitybatch
