#include "execute/forwards.hpp"

#include "autograd/engine.hpp"
#include "core/batch_form.hpp"
#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/pinned_copies.hpp"
#include "core/rng.hpp"
#include "core/unwatched.hpp"
#include "coupled/foreign_draws.hpp"
#include "coupled/part_of_batch.hpp"
#include "execute/buffer_values.hpp"
#include "execute/copied_batch.hpp"
#include "execute/findings.hpp"
#include "execute/gradient_look.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

namespace infinitybatch {
namespace {

Batch rows_of(const BatchSource& source, Rows rows) {
  if (!keeps_rows(source)) PinnedCopies::wait();  // it may write to the memory of the last ones
  return source.rows(rows.begin, rows.end);
}

/// Of each leaf's memory; writes raise them.
std::vector<uint32_t> versions_of(const Batch& batch) {
  std::vector<uint32_t> versions;
  for (const Leaf& leaf : batch.leaves()) {
    const bool counted = leaf.tensor.defined() && !leaf.tensor.is_inference();
    versions.push_back(counted ? static_cast<uint32_t>(leaf.tensor._version()) : 0);
  }
  return versions;
}

std::string size_of_all(const Problem& problem) {
  return "micro_batch_size=" + std::to_string(problem.batch_size());
}

}  // namespace

Forwards::Forwards(const Setup& setup, std::function<void()> release)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      release_(std::move(release)),
      buffers_(setup.problem.buffers, setup.problem.exact_coupling),
      state_(watch_.memory()) {
  watch_.know_parameters(setup.problem.parameters);
  if (setup.resources.renormed != nullptr) watch_.renormed()->expect(setup.resources.renormed);
  parameters_.emplace(setup.problem.parameters, watch_.memory(), setup.problem.exact_coupling);
  state_.leave(buffers_of(setup.problem));
  checks_ = {&buffers_, &*parameters_, &watch_, &state_};
  if (setup.problem.match_native_rng) watch_.watch_draws(devices_of(setup.problem));
}

void Forwards::note_rows(Rows rows) {
  smallest_ = smallest_ == 0 ? rows.size() : std::min(smallest_, rows.size());
  buffers_.note_whole(problem_.loss.coupled() != nullptr && rows.size() == problem_.batch_size());
}

Batch Forwards::load_inputs(Rows rows) {
  // Those of a wrapped call stay what they are.
  const bool stay = problem_.loss.external() != nullptr;
  const Batch given =
      stay ? problem_.inputs->rows(rows.begin, rows.end) : rows_of(*problem_.inputs, rows);
  const bool again = !streams(problem_, strategy_);
  if (again && !problem_.inputs->uniform && !wrote_inputs_) sources_.meet(rows, given);
  return to_device(problem_.trimming ? problem_.trimming->inputs(given, rows) : given,
                   problem_.device);
}

/// Leaves on the host go to the model's device; leaves on an accelerator stay where the user put
/// them.
void Forwards::load_targets(Rows rows) {
  targets = rows_of(*problem_.targets, rows);
  if (problem_.trimming) targets = problem_.trimming->targets(targets, rows);
  if (problem_.trimming) problem_.trimming->at_work = rows;
  targets = to_device(targets, problem_.device);
}

Batch Forwards::rows_again(Rows rows) const {
  const Batch given = rows_of(*problem_.inputs, rows);
  return to_device(problem_.trimming ? problem_.trimming->inputs(given, rows) : given,
                   problem_.device);
}

void Forwards::load(Rows rows) {
  if (problem_.interrupt) problem_.interrupt();
  learn_numbers();
  if (first_.size() == 0) first_ = rows;
  uneven_ = uneven_ || rows.size() != first_.size();
  inputs = load_inputs(rows);
  load_targets(rows);
  if (problem_.inputs->uniform && problem_.targets->uniform && !problem_.trimming) return;
  Dims dims = dims_of(inputs);
  for (auto& leaf : dims_of(targets)) dims.push_back(std::move(leaf));
  if (std::find(lengths_.begin(), lengths_.end(), dims) == lengths_.end()) {
    lengths_.push_back(std::move(dims));
  }
}

void Forwards::release() {
  outputs = Batch();  // where what was to read them has failed
  inputs = Batch();
  targets = Batch();
  at::autocast::clear_cache();
}

void Forwards::run(Rows rows) {
  std::optional<coupled::PartOfBatch::Facts> facts;
  if (problem_.exact_coupling)
    facts = {rows.size(), problem_.batch_size(), problem_.match_native_rng};
  const coupled::PartOfBatch part_of_batch(facts);
  const coupled::CouplingWatch::Scope watching(watch_);
  const std::vector<uint32_t> before = versions_of(inputs);
  const bool part = rows.size() < problem_.batch_size();
  // Streams give each micro-batch the numbers of the whole batch.
  const bool streams = strategy_.is_cut() && !strategy_.per_micro_batch();
  const coupled::ForeignDraws foreign(problem_.match_native_rng && !streams && part);
  {
    const CarriedState::Scope stateful(problem_.exact_coupling ? state_at_work_ : nullptr, rows,
                                       problem_.batch_size());
    without_collectives("forward", why_no_collectives(rows), [&] {
      few_.watch(rows.size(), [&] {
        outputs = problem_.model->forward(inputs);
        if (problem_.trimming) outputs = problem_.trimming->padded(outputs, inputs);
      });
    });
  }
  note_own_backward();
  watch_.rethrow();
  if (problem_.trimming) refuse_beside_trimming(versions_of(inputs) != before);
  // Provisional where forward is cut: they follow statistics of the whole batch.
  if (!strategy_.is_cut() && state_at_work_ == &state_)
    buffers_.note_means(watch_.take_means(), rows.size());
  if (auto name = foreign.drew()) foreign_draw_ = std::move(name);
  wrote_inputs_ = wrote_inputs_ || versions_of(inputs) != before;
}

/// Natively forward runs once, on all samples: what it asks other ranks then, they answer.
std::optional<std::string> Forwards::why_no_collectives(Rows rows) const {
  if (rows.size() < problem_.batch_size()) {
    return "on " + std::to_string(rows.size()) + " of this rank's " +
           std::to_string(problem_.batch_size()) +
           " samples, and other ranks need not split theirs alike; run it in the loss, which sees "
           "all outputs once, or give " +
           size_of_all(problem_);
  }
  const bool counts = state_at_work_ == &state_ && !problem_.rehearses && !strategy_.reuses_tapes;
  if (counts && !watch_.collective()) return std::nullopt;
  return "in a run beside the one that other ranks answer (a second forward, a measurement, a "
         "check); run it in the loss, or give " +
         size_of_all(problem_) + " with retained_micro_batches=1 and without static_graph";
}

/// Ops of the whole batch would see padding, or not all of it; and rows are copies.
void Forwards::refuse_beside_trimming(bool wrote_inputs) const {
  if (wrote_inputs) {
    throw Unsupported(
        "forward changes its inputs in place, and with trim= these are copies, so that the "
        "caller's would stay; write that out of place, as in x = x - mean");
  }
  if (!problem_.exact_coupling || watch_.seen().empty()) return;
  const coupled::CoupledOp& seen = watch_.seen().front();
  throw CouplingError(seen.op, seen.op +
                                   " combines the samples of a batch, and with trim= it would not "
                                   "see the padding that it sees natively; leave trim out, or "
                                   "accept another gradient with "
                                   "batch_coupling=\"per_micro_batch\"");
}

void Forwards::note_own_backward() {
  if (own_backward_ || !problem_.looks_at_rows()) return;
  // Once: backward may talk to other ranks, who need not look in the same steps.
  if (resources_.findings->rows_seen.looked > 0) return;
  own_backward_ = own_backward_of(outputs);
}

Batch Forwards::call(Rows rows) {
  run(rows);
  check_coupling(rows);
  return std::exchange(outputs, Batch());
}

void Forwards::check_coupling(Rows rows) {
  if (problem_.exact_coupling) watch_.check(rows.size(), problem_.batch_size());
  if (!problem_.match_native_rng || rows.size() == problem_.batch_size()) return;
  const std::optional<std::string>& drew = watch_.drew() ? watch_.drew() : foreign_draw_;
  drew_ = drew.has_value();
  if (drew) coupled::refuse_draws(*drew, rows.size(), problem_.batch_size());
}

bool Forwards::saw_across_batch() const {
  return std::any_of(
      watch_.seen().begin(), watch_.seen().end(),
      [](const coupled::CoupledOp& seen) { return seen.op == "infinitybatch::across_batch"; });
}

bool Forwards::saw_coupling() const {
  return drew_ || std::any_of(watch_.seen().begin(), watch_.seen().end(),
                              [](const auto& seen) { return coupled::has_stand_in(seen.op); });
}

Batch Forwards::uncounted(const std::function<Batch()>& forward) {
  CarriedState* const counted = std::exchange(state_at_work_, nullptr);
  try {
    Batch given = state_.runs().uncounted(forward);
    state_at_work_ = counted;
    return given;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    state_at_work_ = counted;
    throw;
  }
}

void Forwards::learn_numbers() {
  PlainRuns& runs = state_.runs();
  if (learning_ || !runs.wants_to_learn()) return;
  learning_ = true;
  CarriedState* const counted = std::exchange(state_at_work_, nullptr);
  const RngSnapshot random = RngSnapshot::capture(devices_of(problem_));
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(problem_.buffers);
  const auto told = std::tuple(first_, uneven_, lengths_);  // of the step's own micro-batches
  const auto undo = [&] {
    release_();
    std::tie(first_, uneven_, lengths_) = told;
    parameters_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
  };
  const auto end = [&] {
    state_at_work_ = counted;
    learning_ = false;
  };
  try {
    runs.learn(problem_.batch_size(), [&](Rows rows) {
      const at::NoGradGuard no_grad;  // nobody goes back
      try {
        load(rows);
        if (wrote_inputs_) inputs = copied(inputs);
        run(rows);
      } catch (...) {
        keep_foreign_exception(std::current_exception());
        undo();
        throw;
      }
      Batch given = std::exchange(outputs, Batch());
      undo();
      return given;
    });
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Forwards::aside(bool trial, const std::function<void()>& forward) {
  const RngSnapshot random = RngSnapshot::capture(devices_of(problem_));
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(problem_.buffers);
  const auto told = std::tuple(first_, uneven_, lengths_);  // of the step's own micro-batches
  CarriedState trial_state(watch_.memory(), state_);
  trial_state.leave(buffers_of(problem_));
  state_at_work_ = &trial_state;
  const auto undo = [&] {
    release_();
    state_at_work_ = &state_;
    trial_state.roll_back();
    std::tie(first_, uneven_, lengths_) = told;
    trial ? parameters_->end_trial() : parameters_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
  };
  try {
    forward();
  } catch (...) {
    undo();
    watch_.forget_errors();
    throw;
  }
  undo();
}

void Forwards::record_elsewhere(
    Rows rows,
    const std::function<void(const Batch& inputs, const tape::Tape&, const Batch& outputs)>& use) {
  aside(/*trial=*/false, [&] {
    load(rows);
    tape::Recorder recorder(inputs, buffers_of(problem_), devices_of(problem_));
    // One that is cut for memory, or offloads, has no room for a graph.
    if (strategy_.is_cut() && (strategy_.checkpoints() || strategy_.offloads()))
      recorder.lighten(problem_.device);
    const Batch given = recorder.run([&] {
      run(rows);
      return std::exchange(outputs, Batch());
    });
    use(inputs, recorder.finish(given), given);
  });
}

void Forwards::commit() {
  apart_ = true;
  for (Check* check : checks_) check->commit();
  apart_ = false;
}

}  // namespace infinitybatch
