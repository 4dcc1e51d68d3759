#include "execute/static_tapes.hpp"

#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <string>
#include <utility>

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

bool StaticTapes::knows(int64_t rows) const {
  const auto entry = by_rows.find(rows);
  return !*varies && entry != by_rows.end() && entry->second.confirmed;
}

std::shared_ptr<const Recorded> StaticTapes::use(int64_t rows) {
  if (!knows(rows)) return nullptr;
  Entry& entry = by_rows.at(rows);
  entry.used = steps;
  return entry.recorded;
}

void StaticTapes::keep(int64_t rows, const Recorded& recorded) {
  const auto kept = std::make_shared<Recorded>(recorded);
  for (tape::External& external : kept->tape.externals.own()) {
    external.version.reset();  // parameters change from step to step
  }
  by_rows[rows] = {kept, /*confirmed=*/false, /*met=*/steps, /*begun=*/steps};
}

bool StaticTapes::is_known(int64_t rows, const tape::Tape& tape) {
  const auto place = by_rows.find(rows);
  if (place == by_rows.end()) return false;
  const Entry known = place->second;
  const auto found = tape::difference(known.recorded->tape, tape);
  if (!found) return true;
  if (known.met == steps) {
    throw Unsupported(
        "static_graph says that forward is the same program for each micro-batch of " +
        std::to_string(rows) + " samples, but two of them differ: " + *found +
        "; leave static_graph out");
  }
  // Recordings of other numbers of rows are of the program before, too.
  const bool used = std::any_of(by_rows.begin(), by_rows.end(),
                                [&](const auto& each) { return each.second.used > known.met; });
  by_rows.clear();
  if (!used) {
    if (std::exchange(changed, true)) distrust();
    return false;
  }
  *outdated = true;
  const int64_t unseen = steps - known.met - 1;
  std::string since = ". It ran last " + std::to_string(unseen + 1) + " steps ago, so the " +
                      std::to_string(unseen) +
                      " in between may have gradients of the program before";
  if (unseen == 0) since = ", after micro-batches of this step had used the one before";
  throw Unsupported(
      "static_graph says that forward is the same program in each step, but it has become another "
      "one: " +
      *found + since +
      ". What decides it has to be an argument of forward, or an attribute of a module; then run "
      "this step again, which records forward anew. Or leave static_graph out");
}

void StaticTapes::believe(Entry& entry, const tape::Tape& tape) {
  entry.met = steps;
  if (!tape::same_witnesses(entry.recorded->tape, tape)) return distrust();
  // What alternates is the same for all micro-batches of one step.
  entry.confirmed = runs_alone(tape) && (!changed || steps > entry.begun);
}

void StaticTapes::meet(int64_t rows, const Recorded& recorded) {
  if (*varies) return;
  ran = true;
  if (!is_known(rows, recorded.tape)) {
    if (!*varies) keep(rows, recorded);
    return;
  }
  believe(by_rows.at(rows), recorded.tape);
}

void StaticTapes::compare(int64_t rows, const tape::Tape& tape) {
  ran = true;
  if (is_known(rows, tape)) believe(by_rows.at(rows), tape);
}

void StaticTapes::end_step() {
  ++steps;
  ran = false;
}

void StaticTapes::forget() {
  by_rows.clear();
  ran = false;
}

void StaticTapes::distrust() {
  *varies = true;
  by_rows.clear();
}

}  // namespace infinitybatch
