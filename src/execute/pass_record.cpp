// The part of Pass that records micro-batches and decides whether their tapes can be believed.
#include "core/batch_form.hpp"
#include "core/bits.hpp"
#include "core/rng.hpp"
#include "coupled/draw_laws.hpp"
#include "execute/external_loss.hpp"
#include "execute/findings.hpp"
#include "execute/light_recording.hpp"
#include "execute/pass.hpp"
#include "execute/plain_runs.hpp"
#include "tape/arguments.hpp"
#include "tape/recorder.hpp"
#include "tape/sample_flow.hpp"
#include "tape/witness.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

namespace infinitybatch {
namespace {

constexpr const char* kWayOut =
    "; make the budget large enough for one micro-batch, put the layer into eval mode, or accept "
    "another gradient with batch_coupling=\"per_micro_batch\"";

[[noreturn]] void refuse(const std::string& op, const std::string& why) {
  throw CouplingError(op, op + " couples the samples of a batch, and " + why + kWayOut);
}

std::string name_of(const coupled::CouplingWatch& watch, const tape::Tape& tape) {
  if (!watch.seen().empty()) return watch.seen().front().op;
  const std::vector<uint32_t> draws = coupled::drawing_ops(tape);
  if (!draws.empty()) return tape.ops[draws.front()].facts->name();
  if (!watch.renormed()->empty()) return "aten::embedding_renorm_";
  return watch.drew().value_or("an op of the whole batch");
}

/// Every op that the watch saw has to stand on the tape under its own name.
void check_seen(const tape::Tape& tape, const coupled::CouplingWatch& watch) {
  std::map<std::string, int64_t> hidden;
  for (const coupled::CoupledOp& op : watch.seen()) ++hidden[op.op];
  for (const uint32_t position : coupled::whole_batch_ops(tape)) {
    --hidden[tape.ops[position].facts->name()];
  }
  for (const auto& [op, count] : hidden) {
    if (count > 0) refuse(op, "it runs inside of another op, where it cannot be cut");
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

/// A number that the program holds as a tensor.
bool same_number(const tape::External& a, const tape::External& b) {
  const auto is_number = [](const tape::External& external) {
    return external.input_leaf < 0 && !external.is_buffer && !external.before.defined() &&
           external.tensor.defined() && external.tensor.is_cpu() && external.tensor.dim() == 0 &&
           !external.tensor.requires_grad();
  };
  return a.value == b.value && is_number(a) && is_number(b) && a.version == b.version &&
         same_form(a.tensor, b.tensor) && !any_bit_differs(a.tensor, b.tensor).item<bool>();
}

/// \param ops    positions of those that see the whole batch
/// \param beside where it is cut for memory, too
void cut_at(Recorded& recorded, const std::vector<uint32_t>& ops,
            const std::vector<uint32_t>& beside) {
  const tape::Tape& tape = recorded.tape;
  std::vector<uint32_t> positions;
  std::merge(ops.begin(), ops.end(), beside.begin(), beside.end(), std::back_inserter(positions));
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
    refuse(tape.ops[first].facts->name(), error.what_without_backtrace());
  }
  recorded.note_users();
}

}  // namespace

tape::Tape Pass::record_tape(const Batch& inputs, coupled::CouplingWatch& watch,
                             const std::function<Batch()>& forward, bool disturbed,
                             Batch* outputs) {
  watch.forget();
  tape::Recorder recorder(inputs, held_buffers_, devices_);
  if (disturbed) recorder.disturb(coupled::is_provisional);
  if (strategy_.reuses_tapes) recorder.witness();
  if (records_lightly()) recorder.lighten(problem_.device);
  const Batch given = records_lightly() ? run_lightly(recorder, forward) : recorder.run(forward);
  const bool cuts = strategy_.reuses_tapes || !watch.seen().empty() || draws(watch);
  if (problem_.loss.external() != nullptr && !cuts) throw NothingToCut();
  tape::Tape tape = recorder.finish(given, /*trimmed=*/false);
  // Statistics may come out as they were (a mean of zeros), and differ the next time.
  for (const tape::External& external : tape.externals) {
    if (external.is_buffer && external.before.defined()) buffers_.note_write(external.tensor);
  }
  for (const coupled::CoupledOp& op : watch.seen()) {
    if (!coupled::has_stand_in(op.op)) refuse(op.op, op.why);
  }
  if (tape.refusal) {
    throw Unsupported(*tape.refusal + ", so micro-batches would not see what the whole batch sees");
  }
  tape.whole_draws = streams_ != nullptr;
  coupled::check_draws(tape);
  const bool uncoupled = watch.seen().empty() && !watch.drew();
  if (tape.opaque && uncoupled && strategy_.reuses_tapes) {
    throw Unsupported("forward cannot be used again as a tape, as static_graph asks for: " +
                      *tape.opaque + "; leave static_graph out");
  }
  if (tape.opaque)
    refuse(name_of(watch, tape), "the forward around it cannot be cut: " + *tape.opaque);
  if (outputs != nullptr) *outputs = given;
  return tape;
}

Batch Pass::record(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                   const Forward& forward, const Elsewhere& elsewhere) {
  Part& part = parts_[rows.begin];
  rewind_random();
  const bool check = !resources_.findings->recordings_checked && !checked_;
  const RngSnapshot before = check ? RngSnapshot::capture(devices_) : RngSnapshot();
  Batch outputs;
  auto recorded = std::make_shared<Recorded>();
  recorded->tape = record_tape(inputs, watch, forward.once, /*disturbed=*/false, &outputs);
  meet_random(recorded->tape);
  check_seen(recorded->tape, watch);
  if (const auto op = coupled::early_read(recorded->tape)) {
    refuse(name_of(watch, recorded->tape),
           *op +
               " reads values that depend on it before the whole batch has been "
               "there, so what forward does next is not known from "
               "micro-batches");
  }
  std::vector<bool> from_samples;
  for (const Leaf& leaf : inputs.leaves()) from_samples.push_back(leaf.batch_dim != Leaf::kShared);
  if (const auto op = coupled::given_something_else(recorded->tape, from_samples)) {
    refuse(*op,
           "it is given a tensor that does not come from the samples (a parameter, positions, a "
           "shared leaf), which the whole batch has once");
  }
  const tape::Tape whole = check ? recorded->tape : tape::Tape();
  const PlainNumbers* const known = PlainNumbers::at_work();
  bool numbers = known != nullptr && known->moves();
  const bool counts =
      strategy_.reuses_tapes && (reads_buffers(recorded->tape) || rebinds_buffers());
  tape::trim(recorded->tape);
  const std::vector<uint32_t> ops = coupled::whole_batch_ops(recorded->tape);
  std::vector<uint32_t> beside;
  if (strategy_.checkpoints()) beside = resources_.checkpoints->choose(recorded->tape, ops);
  cut_at(*recorded, ops, beside);
  share_found(recorded->tape);
  learn_draws(rows, inputs, recorded->tape, watch, elsewhere);
  begin(part, recorded);
  if (check) {
    checked_ = true;
    check_replay(part, rows, inputs, outputs);
    tape::Tape again = disturbed(inputs, watch, forward, before, /*as_first=*/false);
    std::optional<std::string> found = tape::difference(whole, again);
    // A counter may decide what forward does, or a flag that the first call resets.
    if (found && !numbers) numbers = forward.depends_on_state();
    if (found && numbers) {
      again = disturbed(inputs, watch, forward, before, /*as_first=*/true);
      found = tape::difference(whole, again);
    }
    if (found) {
      if (!warm_ && tape::same_of_samples(whole, again, inputs)) {
        warm_ = true;
        before.restore();
        return record_anew(rows, inputs, watch, forward, elsewhere);
      }
      refuse(name_of(watch, whole),
             "forward took another way when its result was another (" + *found +
                 "), so it reads values before the whole batch has been there");
    }
  }
  // Such numbers are others in each step (BatchNorm's with momentum=None, a counter), and such
  // buffers other tensors, so that every micro-batch is recorded. A tape is used again in the state
  // that it was recorded in.
  numbers = numbers || (known != nullptr && known->moves());
  if (strategy_.reuses_tapes && numbers) resources_.static_tapes->by_rows.clear();
  if (strategy_.reuses_tapes && !counts && !numbers) confirm(rows, recorded);
  return without_graph(outputs);
}

tape::Tape Pass::disturbed(const Batch& inputs, coupled::CouplingWatch& watch,
                           const Forward& forward, const RngSnapshot& before, bool as_first) {
  const RngSnapshot after = RngSnapshot::capture(devices_);
  before.restore();
  if (streams_) shift_random();
  buffers_.end_micro_batch();
  tape::Tape again = record_tape(
      inputs, watch, [&] { return forward.again(as_first); }, /*disturbed=*/true, nullptr);
  after.restore();
  return again;
}

/// Forward's first call made what later ones find (a table, a mask): none of the micro-batches that
/// follow would run its program.
Batch Pass::record_anew(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                        const Forward& forward, const Elsewhere& elsewhere) {
  buffers_.end_micro_batch();
  parts_.erase(rows.begin);
  ops_.clear();
  resources_.findings->draw_laws = {};
  checked_ = false;
  return record(rows, inputs, watch, forward, elsewhere);
}

/// Every micro-batch finds the step's own buffers, and mostly the same numbers in its program: one
/// copy of them will do.
void Pass::share_found(tape::Tape& tape) {
  const auto* first = parts_.begin()->second.recorded.get();
  for (size_t i = 0; i < tape.externals.size(); ++i) {
    tape::External& external = tape.externals[i];
    if (first != nullptr && i < first->tape.externals.size() &&
        same_number(external, first->tape.externals[i])) {
      external = first->tape.externals[i];
    }
    if (!external.is_buffer || !external.before.defined() || !external.tensor.defined()) continue;
    at::Tensor& known = found_buffers_[external.tensor.unsafeGetTensorImpl()];
    if (!known.defined()) known = external.before;
    external.before = known;
  }
}

void Pass::begin(Part& part, std::shared_ptr<const Recorded> recorded) {
  part.recorded = std::move(recorded);
  part.random.resize(part.recorded->segments.size());
  // Stand-ins know where to draw by themselves.
  if (!streams_) part.random[0] = part.recorded->tape.initial;
  if (strategy_.per_micro_batch()) return;
  if (parts_.size() == 1 && ops_.empty()) {
    const tape::Tape& tape = part.recorded->tape;
    coupled::DrawLaws& laws = resources_.findings->draw_laws;
    const bool known = problem_.match_native_rng && laws.fit(tape);
    auto law = known ? laws.laws.begin() : std::vector<coupled::DrawLaw>::iterator();
    for (size_t s = 1; s < part.recorded->stretches.size(); ++s) {
      const tape::Op& op = part.recorded->first_op(part.recorded->stretches[s]);
      ops_.push_back(coupled::draws_for_all(tape, op)
                         ? coupled::draw_stand_in(tape, op, known ? &*law++ : nullptr, streams_)
                         : coupled::stand_in(tape, op));
    }
  }
  agree(part);
}

/// Whether forward has put another tensor in a buffer's place, as no tape does.
bool Pass::rebinds_buffers() const {
  return std::any_of(problem_.buffers.begin(), problem_.buffers.end(), [&](const BufferSlot& slot) {
    const at::Tensor now = slot.get();
    return now.defined() && std::none_of(held_buffers_.begin(), held_buffers_.end(),
                                         [&](const at::Tensor& held) { return held.is_same(now); });
  });
}

void Pass::confirm(Rows rows, const std::shared_ptr<const Recorded>& recorded) {
  // Numbers of Python's stand in it as constants, and nobody would draw those of the next step.
  if (streams_ && tell_foreign_sources() != foreign_before_) return;
  if (*resources_.static_tapes->varies) return;
  StaticTapes::Entry& entry = resources_.static_tapes->by_rows[rows.size()];
  if (!entry.recorded) {
    const auto kept = std::make_shared<Recorded>(*recorded);
    for (tape::External& external : kept->tape.externals) {
      external.version.reset();  // parameters change from step to step
    }
    entry.recorded = kept;
    return;
  }
  if (const auto found = tape::difference(entry.recorded->tape, recorded->tape)) {
    throw Unsupported(
        "static_graph says that forward is the same program for each micro-batch of " +
        std::to_string(rows.size()) + " samples, but two of them differ: " + *found +
        "; leave static_graph out");
  }
  if (!tape::same_witnesses(entry.recorded->tape, recorded->tape)) return distrust();
  // A function of the user's runs in every step, so that it has to be met in every step.
  const auto& ops = recorded->tape.ops;
  entry.confirmed = std::none_of(ops.begin(), ops.end(), [](const tape::Op& op) {
    return op.facts != nullptr && op.facts->name() == "infinitybatch::across_batch";
  });
  // Nor would a recording scale the rows that other samples look up.
  entry.confirmed = entry.confirmed && !recorded->tape.scales_rows;
  // Nor does a recording know where a generator of the user's stands in the next step.
  for (const tape::Draw& draw : recorded->tape.draws) {
    entry.confirmed = entry.confirmed && !draw.passed;
  }
}

bool Pass::reuse(Rows rows) {
  if (!strategy_.reuses_tapes || *resources_.static_tapes->varies) return false;
  const auto entry = resources_.static_tapes->by_rows.find(rows.size());
  if (entry == resources_.static_tapes->by_rows.end() || !entry->second.confirmed) return false;
  if (streams_ && rows.size() < problem_.batch_size() &&
      !resources_.findings->draw_laws.fit(entry->second.recorded->tape)) {
    return false;
  }
  Part& part = parts_[rows.begin];
  begin(part, entry->second.recorded);
  part.reused = true;
  if (streams_) return true;
  for (tape::Draw& draw : part.random[0]) draw.state = tape::fork(draw.generator);
  return true;
}

/// Whether numbers of the whole batch were asked for, and forward has drawn any.
bool Pass::draws(const coupled::CouplingWatch& watch) const {
  return streams_ && (watch.drew() || tell_foreign_sources() != foreign_before_);
}

/// Every forward begins where the whole batch's would.
void Pass::rewind_random() const {
  if (!streams_) return;
  streams_->rewind();
  foreign_->restore();
}

/// \throws CouplingError where forward draws for these rows what it does not draw for others
void Pass::meet_random(const tape::Tape& tape) {
  if (!streams_) return;
  streams_->meet(tape);
  const auto now = tell_foreign_sources();
  if (!foreign_after_) foreign_after_ = now;
  for (const auto& [name, state] : now) {
    if (foreign_after_->at(name) == state) continue;
    throw CouplingError(
        name, "forward draws from the module " + name +
                  ", and not equally often for each micro-batch, so match_native_rng does not know "
                  "the numbers of the whole batch; draw as often for any number of samples, or by "
                  "torch.rand");
  }
}

/// Other numbers than the first time.
void Pass::shift_random() {
  for (const at::Device& device : devices_) {
    tape::fork(at::globalContext().defaultGenerator(device));
  }
}

void Pass::learn_draws(Rows rows, const Batch& inputs, const tape::Tape& tape,
                       coupled::CouplingWatch& watch, const Elsewhere& elsewhere) {
  const int64_t total = problem_.batch_size();
  if (!streams_ || rows.size() == total || parts_.size() > 1) return;
  // What Python's numbers decide may be another way in each step.
  const bool decided = *foreign_after_ != foreign_before_;
  if (!decided && resources_.findings->draw_laws.fit(tape)) return;
  // Another number of samples tells which dimensions follow it.
  const Rows other = other_rows(rows, total);
  buffers_.end_micro_batch();
  rewind_random();
  elsewhere(other, [&](const Batch& others, const std::function<Batch()>& run) {
    tape::Tape second = record_tape(others, watch, run, /*disturbed=*/false, nullptr);
    meet_random(second);
    tape::trim(second);
    resources_.findings->draw_laws =
        coupled::find_draw_laws({tape, inputs, rows.size()}, {second, others, other.size()});
  });
}

void Pass::agree(const Part& part) {
  const Recorded& first = *parts_.begin()->second.recorded;
  const Recorded& here = *part.recorded;
  const size_t count = std::max(here.stretches.size(), first.stretches.size());
  for (size_t s = 1; s < count; ++s) {
    const auto op = [s](const Recorded& of) -> const tape::Op& {
      return of.first_op(of.stretches[s]);
    };
    const auto name = [&](const Recorded& of) {
      return s < of.stretches.size() ? op(of).facts->name() : std::string("none");
    };
    const bool both = name(here) != "none" && name(first) != "none";
    if (both && coupled::same_layer(first.tape, op(first), here.tape, op(here))) continue;
    refuse(name(first) == "none" ? name(here) : name(first),
           "micro-batches do not run the same layers that see the whole batch (number " +
               std::to_string(s) + " is " + name(first) + " in the first and " +
               (name(here) == name(first) ? "another " : "") + name(here) + " in another)");
  }
}

/// What `tape::replay` gives, segment by segment: the graph of one of them is there at a time. All
/// ops run as they were recorded, without stand-ins.
Batch Pass::replay_lightly(const Recorded& recorded, Rows rows, const Batch& inputs) {
  const auto plain = std::make_shared<Recorded>();
  plain->tape = recorded.tape;
  std::vector<tape::Cut> cuts;
  for (size_t s = 1; s < recorded.segments.size(); ++s) {
    cuts.push_back({recorded.segments[s].ops.begin});
  }
  plain->segments = tape::cut(plain->tape, cuts);
  plain->note_users();
  Part part;
  part.recorded = plain;
  part.random.resize(plain->segments.size());
  part.random[0] = plain->tape.initial;
  Work work;
  for (int64_t s = 0; s < static_cast<int64_t>(plain->segments.size()); ++s) {
    work = Work();
    work = go_through(part, rows, inputs, s, /*inside=*/false);
    let_go(part, s);
  }
  return tape::result_of(plain->tape, work.values);
}

void Pass::check_replay(const Part& part, Rows rows, const Batch& inputs, const Batch& outputs) {
  // Segments of a static graph find in buffers what this step left there.
  const bool light = records_lightly() && !strategy_.reuses_tapes;
  const Batch again = light ? replay_lightly(*part.recorded, rows, inputs)
                            : tape::replay(part.recorded->tape, inputs);
  const at::NoGradGuard no_grad;
  at::Tensor differs = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(problem_.device));
  note_differences(outputs, again, differs);
  if (differs.item<bool>()) {
    refuse(ops_.empty() ? "forward"
                        : part.recorded->first_op(part.recorded->stretches[1]).facts->name(),
           "a replay of forward gave other outputs than its recording");
  }
}

}  // namespace infinitybatch
