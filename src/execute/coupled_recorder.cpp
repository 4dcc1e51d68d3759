#include "execute/coupled_recorder.hpp"

#include "core/batch_form.hpp"
#include "core/bits.hpp"
#include "core/pinned_copies.hpp"
#include "coupled/draw_laws.hpp"
#include "execute/buffer_rule.hpp"
#include "execute/checkpoints.hpp"
#include "execute/cut_micro_batch.hpp"
#include "execute/external_loss.hpp"
#include "execute/findings.hpp"
#include "execute/light_recording.hpp"
#include "execute/plain_runs.hpp"
#include "execute/static_tapes.hpp"
#include "tape/arguments.hpp"
#include "tape/recorder.hpp"
#include "tape/sample_flow.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

std::string name_of(const coupled::CouplingWatch& watch, const tape::Tape& tape) {
  if (!watch.seen().empty()) return watch.seen().front().op;
  const std::vector<uint32_t> draws = coupled::drawing_ops(tape);
  if (!draws.empty()) return tape.ops[draws.front()].facts->name();
  if (!watch.renormed()->empty()) return "aten::embedding_renorm_";
  return watch.drew().value_or("an op of the whole batch");
}

/// Every op that the watch saw has to stand on the tape under its own name, and what it is given
/// and what becomes of its result have to be known from a micro-batch.
void check_seen(const tape::Tape& tape, const coupled::CouplingWatch& watch, const Batch& inputs) {
  std::map<std::string, int64_t> hidden;
  for (const coupled::CoupledOp& op : watch.seen()) ++hidden[op.op];
  for (const uint32_t position : coupled::whole_batch_ops(tape)) {
    --hidden[tape.ops[position].facts->name()];
  }
  for (const auto& [op, count] : hidden) {
    if (count > 0) refuse_to_cut(op, "it runs inside of another op, where it cannot be cut");
  }
  if (const auto op = coupled::early_read(tape)) {
    refuse_to_cut(name_of(watch, tape),
                  *op +
                      " reads values that depend on it before the whole batch has been "
                      "there, so what forward does next is not known from "
                      "micro-batches");
  }
  std::vector<bool> from_samples;
  for (const Leaf& leaf : inputs.leaves()) from_samples.push_back(leaf.batch_dim != Leaf::kShared);
  if (const auto op = coupled::given_something_else(tape, from_samples)) {
    refuse_to_cut(*op,
                  "it is given a tensor that does not come from the samples (a parameter, "
                  "positions, a shared leaf), which the whole batch has once");
  }
}

/// Whether Python reads a number out of a buffer.
bool reads_buffers(const tape::Tape& tape) {
  std::set<uint32_t> buffers;
  for (const tape::External& external : tape.externals) {
    if (external.is_buffer) buffers.insert(tape.memories[external.value]);
  }
  buffers.erase(tape::kNoMemory);
  bool reads = false;
  for (const tape::Op& op : tape.ops) {
    if (op.facts == nullptr || !op.reads_values) continue;
    tape::for_each_argument(tape, op, [&](tape::ValueId value, const tape::Slot&) {
      reads = reads || buffers.contains(tape.memories[value]);
    });
  }
  return reads;
}

/// What `tape::replay` gives, segment by segment: the graph of one of them is there at a time. All
/// ops run as they were recorded, without stand-ins.
Batch replay_lightly(const Recorded& recorded, Rows rows, const Batch& inputs) {
  const auto plain = std::make_shared<Recorded>();
  plain->tape = recorded.tape;
  std::vector<tape::Cut> cuts;
  for (size_t s = 1; s < recorded.segments.size(); ++s) {
    cuts.push_back({recorded.segments[s].ops.begin});
  }
  plain->segments = tape::cut(plain->tape, cuts);
  plain->note_users();
  CutMicroBatch micro_batch(rows, plain, /*ops=*/nullptr);
  PlayedSegment played;
  for (int64_t s = 0; s < micro_batch.segments(); ++s) {
    played = PlayedSegment();
    played = micro_batch.go_through(inputs, s);
    micro_batch.leave(s);
  }
  return tape::result_of(plain->tape, played.values);
}

/// Whether a micro-batch's graph may be more than fits, so that recordings do without.
bool records_lightly(const Strategy& strategy) {
  return strategy.offloads() || strategy.checkpoints();
}

}  // namespace

tape::Tape CoupledRecorder::record_tape(const Batch& inputs, coupled::CouplingWatch& watch,
                                        const std::function<Batch()>& forward, bool disturbed,
                                        Batch* outputs) {
  const bool is_static = model_.strategy.reuses_tapes;
  watch.forget();
  tape::Recorder recorder(inputs, model_.buffers, model_.devices);
  recorder.leave_parameters(model_.parameters);
  if (disturbed) recorder.disturb(coupled::is_provisional);
  if (is_static) recorder.witness();
  recorder.borrow([this](const at::Tensor& buffer) { return found_.in(buffer); });
  const bool lightly = records_lightly(model_.strategy);
  if (lightly) recorder.lighten(model_.problem.device);
  const Batch given = lightly ? run_lightly(recorder, forward) : recorder.run(forward);
  const bool cuts = is_static || !watch.seen().empty() || numbers_.drawn(watch);
  if (model_.problem.loss.external() != nullptr && !cuts) throw NothingToCut();
  tape::Tape tape = recorder.finish(given, /*trimmed=*/false);
  // Statistics may come out as they were (a mean of zeros), and differ the next time.
  for (const tape::External& external : tape.externals) {
    if (external.is_buffer && external.before.defined()) buffers_.note_write(external.tensor);
  }
  for (const coupled::CoupledOp& op : watch.seen()) {
    if (!coupled::has_stand_in(op.op)) refuse_to_cut(op.op, op.why);
  }
  if (tape.refusal) {
    throw Unsupported(*tape.refusal + ", so micro-batches would not see what the whole batch sees");
  }
  tape.whole_draws = numbers_.streams() != nullptr;
  coupled::check_draws(tape);
  const bool uncoupled = watch.seen().empty() && !watch.drew();
  if (tape.opaque && uncoupled && is_static) {
    throw Unsupported("forward cannot be used again as a tape, as static_graph asks for: " +
                      *tape.opaque + "; leave static_graph out");
  }
  if (tape.opaque) {
    refuse_to_cut(name_of(watch, tape), "the forward around it cannot be cut: " + *tape.opaque);
  }
  if (outputs != nullptr) *outputs = given;
  return tape;
}

/// A recording knows of a buffer what ops do to it.
void CoupledRecorder::check_writes(const tape::Tape& tape,
                                   const coupled::CouplingWatch& watch) const {
  const bool is_static = model_.strategy.reuses_tapes;
  const bool coupled = !watch.seen().empty();
  if (!coupled && !is_static) return;
  const std::string* const name = buffers_.written_by_no_op();
  if (name == nullptr) return;
  const std::string why = "forward changes the buffer '" + *name +
                          "' by what is no operator of torch's (NumPy, a pointer), so that a "
                          "recording does not tell which values its ops have read";
  if (coupled) refuse_to_cut(name_of(watch, tape), why);
  throw Unsupported("forward cannot be used again as a tape, as static_graph asks for: " + why +
                    "; leave static_graph out");
}

CoupledRecorder::Recording CoupledRecorder::record(Rows rows, const Batch& inputs,
                                                   coupled::CouplingWatch& watch,
                                                   const RecordableForward& forward) {
  const bool is_static = model_.strategy.reuses_tapes;
  numbers_.rewind();
  const bool check = !model_.resources.findings->recordings_checked && !checked_;
  const RngSnapshot before = check ? RngSnapshot::capture(model_.devices) : RngSnapshot();
  Batch outputs;
  const auto recorded = std::make_shared<Recorded>();
  recorded->outlives_step = is_static;
  recorded->tape = record_tape(inputs, watch, forward.once, /*disturbed=*/false, &outputs);
  numbers_.meet(recorded->tape);
  if (check) check_writes(recorded->tape, watch);
  check_seen(recorded->tape, watch, inputs);
  const tape::Tape whole = check ? recorded->tape : tape::Tape();
  const PlainNumbers* const known = PlainNumbers::at_work();
  const bool counts = is_static && (reads_buffers(recorded->tape) || buffers_.rebinds());
  // What this step's recordings left in buffers (a counter) the rule of buffers has seen.
  const auto left_already = [&tape = recorded->tape](const tape::Op& op) {
    return !coupled::is_whole_batch_op(tape, op);
  };
  tape::trim(recorded->tape, is_static ? std::function<bool(const tape::Op&)>() : left_already);
  cut(*recorded);
  found_.share(recorded->tape, ops_.first() != nullptr ? &ops_.first()->tape : nullptr);
  tape::share_with_last(recorded->tape);
  learn_draws(rows, inputs, recorded->tape, watch, forward);
  ops_.meet(recorded);
  if (check) {
    checked_ = true;
    check_replay(*recorded, rows, inputs, outputs);
    if (!same_when_disturbed(whole, inputs, watch, forward, before)) {
      // Forward's first call made what later ones find (a table, a mask): none of the micro-batches
      // that follow would run its program.
      warm_ = true;
      before.restore();
      buffers_.end_micro_batch();
      ops_.forget();
      model_.resources.findings->draw_laws = {};
      checked_ = false;
      return record(rows, inputs, watch, forward);
    }
  }
  // Such numbers are others in each step (BatchNorm's with momentum=None, a counter), and such
  // buffers other tensors, so that every micro-batch is recorded. A tape is used again in the state
  // that it was recorded in; nobody would draw Python's numbers, which stand in it as constants.
  const bool moves = known != nullptr && known->moves();
  if (is_static && moves) model_.resources.static_tapes->by_rows.clear();
  if (is_static && !counts && !moves && !numbers_.foreign_moved()) {
    model_.resources.static_tapes->meet(rows.size(), *recorded);
  }
  return {recorded, without_graph(outputs)};
}

void CoupledRecorder::cut(Recorded& recorded) const {
  const tape::Tape& tape = recorded.tape;
  const std::vector<uint32_t> ops = coupled::whole_batch_ops(tape);
  std::vector<uint32_t> for_memory;
  if (model_.strategy.checkpoints()) {
    for_memory = model_.resources.checkpoints->choose(tape, ops);
  }
  std::vector<uint32_t> positions;
  std::merge(ops.begin(), ops.end(), for_memory.begin(), for_memory.end(),
             std::back_inserter(positions));
  std::vector<tape::Cut> cuts;
  for (const uint32_t position : positions) {
    const bool sees_all = std::binary_search(ops.begin(), ops.end(), position);
    // What a drawing op writes is its stand-in's to write.
    cuts.push_back({position, sees_all && !coupled::draws_for_all(tape, tape.ops[position])});
    if (sees_all) recorded.stretches.push_back(static_cast<int64_t>(cuts.size()));
  }
  try {
    recorded.segments = tape::cut(tape, cuts);
  } catch (const Unsupported& error) {
    const uint32_t first = ops.empty() ? positions.front() : ops.front();
    refuse_to_cut(tape.ops[first].facts->name(), error.what_without_backtrace());
  }
  recorded.note_users();
}

bool CoupledRecorder::same_when_disturbed(const tape::Tape& whole, const Batch& inputs,
                                          coupled::CouplingWatch& watch,
                                          const RecordableForward& forward,
                                          const RngSnapshot& before) {
  const tape::Tape again = disturbed(inputs, watch, forward, before);
  const std::optional<std::string> found = tape::difference(whole, again);
  if (!found) return true;
  if (!warm_ && tape::same_of_samples(whole, again, inputs)) return false;
  refuse_to_cut(name_of(watch, whole),
                "forward took another way when its result was another (" + *found +
                    "), so it reads values before the whole batch has been there");
}

tape::Tape CoupledRecorder::disturbed(const Batch& inputs, coupled::CouplingWatch& watch,
                                      const RecordableForward& forward, const RngSnapshot& before) {
  const RngSnapshot after = RngSnapshot::capture(model_.devices);
  before.restore();
  numbers_.shift();
  buffers_.end_micro_batch();
  tape::Tape again =
      record_tape(inputs, watch, [&] { return forward.again(); }, /*disturbed=*/true, nullptr);
  after.restore();
  return again;
}

std::shared_ptr<const Recorded> CoupledRecorder::reuse(Rows rows) {
  if (!model_.strategy.reuses_tapes) return nullptr;
  std::shared_ptr<const Recorded> recorded = model_.resources.static_tapes->use(rows.size());
  if (!recorded) return nullptr;
  if (numbers_.streams() && rows.size() < model_.problem.batch_size() &&
      !model_.resources.findings->draw_laws.fit(recorded->tape)) {
    return nullptr;
  }
  ops_.meet(recorded);
  return recorded;
}

bool CoupledRecorder::compares(Rows rows) const {
  if (!model_.strategy.reuses_tapes) return false;
  const StaticTapes& tapes = *model_.resources.static_tapes;
  return tapes.due() && tapes.knows(rows.size());
}

void CoupledRecorder::compare(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                              const std::function<Batch()>& forward) {
  numbers_.rewind();
  tape::Tape tape = record_tape(inputs, watch, forward, /*disturbed=*/false, nullptr);
  watch.forget();
  tape::trim(tape, std::function<bool(const tape::Op&)>());
  model_.resources.static_tapes->compare(rows.size(), tape);
}

void CoupledRecorder::learn_draws(Rows rows, const Batch& inputs, const tape::Tape& tape,
                                  coupled::CouplingWatch& watch, const RecordableForward& forward) {
  const int64_t total = model_.problem.batch_size();
  if (!numbers_.streams() || rows.size() == total || ops_.first() != nullptr) return;
  coupled::DrawLaws& laws = model_.resources.findings->draw_laws;
  // What Python's numbers decide may be another way in each step; and how rows of the user's own
  // making lie in memory one row does not tell.
  const bool told = rows.size() > 1 || keeps_rows(*model_.problem.inputs) ||
                    model_.problem.loss.external() != nullptr;
  if (told && !numbers_.foreign_drawn() && laws.fit(tape)) return;
  // Another number of samples tells which dimensions follow it.
  const Rows other = other_rows(rows, total);
  buffers_.end_micro_batch();
  numbers_.rewind();
  forward.elsewhere(other, [&](const Batch& others, const std::function<Batch()>& run) {
    tape::Tape second = record_tape(others, watch, run, /*disturbed=*/false, nullptr);
    numbers_.meet(second);
    tape::trim(second);
    laws = coupled::find_draw_laws({tape, inputs, rows.size()}, {second, others, other.size()});
  });
}

void CoupledRecorder::check_replay(const Recorded& recorded, Rows rows, const Batch& inputs,
                                   const Batch& outputs) const {
  // Segments of a static graph find in buffers what this step left there.
  const bool light = records_lightly(model_.strategy) && !recorded.outlives_step;
  const Batch again =
      light ? replay_lightly(recorded, rows, inputs) : tape::replay(recorded.tape, inputs);
  const at::NoGradGuard no_grad;
  at::Tensor differs =
      at::zeros({}, at::TensorOptions().dtype(at::kBool).device(model_.problem.device));
  note_differences(outputs, again, differs);
  if (!differs.item<bool>()) return;
  refuse_to_cut(
      ops_.count() == 0 ? "forward" : recorded.first_op(recorded.stretches[1]).facts->name(),
      "a replay of forward gave other outputs than its recording");
}

}  // namespace infinitybatch
