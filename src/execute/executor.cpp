#include <infinitybatch/execute/executor.hpp>

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/batch_form.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/pinned_copies.hpp>
#include <infinitybatch/core/plain_leaves.hpp>
#include <infinitybatch/core/unwatched.hpp>
#include <infinitybatch/coupled/foreign_draws.hpp>
#include <infinitybatch/coupled/part_of_batch.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/execute/execution_log.hpp>
#include <infinitybatch/execute/outside_loss.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/offload/store.hpp>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

Batch rows_of(const BatchSource& source, Rows rows) {
  if (!keeps_rows(source)) PinnedCopies::wait();  // it may write to the memory of the last ones
  return source.rows(rows.begin, rows.end);
}

/// Leaves on the host go to the model's device; leaves on an accelerator stay where the user put
/// them.
Batch load_rows(const BatchSource& source, Rows rows, const at::Device& device) {
  return to_device(rows_of(source, rows), device);
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

Batch detach(const Batch& batch) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = leaf.tensor.detach();
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace

Executor::Executor(const Job& job)
    : job_(job),
      sinks_(job.parameters, job.nested),
      buffers_(job.buffers, job.exact_coupling),
      state_(watch_.memory()),
      experiment_(job.examined,
                  job.examined != nullptr ? devices_of(job) : std::vector<at::Device>(),
                  job.batch_size()),
      total_(job.device) {
  if (job.cut) cut_pass_.emplace(job, sinks_, buffers_);
  watch_.know_parameters(job.parameters);
  if (job.renormed != nullptr) watch_.renormed()->expect(job.renormed);
  parameters_.emplace(job.parameters, watch_.memory(), job.exact_coupling);
  if (job.match_native_rng) watch_.watch_draws(devices_of(job));
  if (job.outside != nullptr) {
    // computes no loss here
  } else if (job.coupled == nullptr) {
    denominator_.emplace(job);
  } else if (job.cut) {
    whole_outputs_.emplace(job);
  } else {
    two_pass_.emplace(job, sinks_);
  }
  if (job.rows_seen != nullptr && job.rows_seen->due(job.batch_size())) {
    watch_peak(high_water_, job.device);
  }
  // Casts made before this step lead to the parameters' own accumulators, past the sinks.
  at::autocast::clear_cache();
}

void Executor::run(const Instruction& instruction, Rows rows) {
  ExecutionLog::note(instruction, rows);
  perform_and_time(instruction, rows);
  // Nothing comes back once gradients have been handed out.
  if (instruction.operation != Operation::hand_out) memory::Limit::check();
}

void Executor::perform_and_time(const Instruction& instruction, Rows rows) {
  if (job_.store == nullptr) return perform(instruction, rows);
  using Clock = std::chrono::steady_clock;
  const offload::StoreStatistics before = job_.store->statistics();
  const Clock::time_point begin = Clock::now();
  copied_bytes_ = 0;
  perform(instruction, rows);
  if (job_.waits && !job_.device.is_cpu()) at::accelerator::synchronizeDevice(job_.device.index());
  const double taken = std::chrono::duration<double>(Clock::now() - begin).count();
  const offload::StoreStatistics after = job_.store->statistics();
  if (instruction.operation == Operation::record ||
      instruction.operation == Operation::whole_loss) {
    copied_bytes_ = after.moved_out - before.moved_out + after.moved_back - before.moved_back;
  }
  const int64_t samples = instruction.micro_batch < 0 ? job_.batch_size() : rows.size();
  times_.add(instruction, samples, taken - (after.seconds_waited - before.seconds_waited),
             copied_bytes_);
}

void Executor::perform(const Instruction& instruction, Rows rows) {
  if (instruction.micro_batch >= 0 && rows.size() > 0) {
    smallest_ = smallest_ == 0 ? rows.size() : std::min(smallest_, rows.size());
  }
  const int64_t segment = instruction.segment;
  switch (instruction.operation) {
    case Operation::load:
      return load(rows);
    case Operation::forward:
      return stream(rows);
    case Operation::loss:
      return loss(rows);
    case Operation::record:
      if (cut_pass_) return record_for_cuts(rows);
      return record(rows, /*retain=*/false);
    case Operation::retain:
      return record(rows, /*retain=*/true);
    case Operation::whole_loss:
      return whole_loss();
    case Operation::replay:
      return replay(rows);
    case Operation::seed:
      return cut_pass_ ? seed() : two_pass_->seed();
    case Operation::advance:
      return advance(rows, segment, /*retain=*/false);
    case Operation::advance_retained:
      return advance(rows, segment, /*retain=*/true);
    case Operation::combine:
      return cut_pass_->combine(segment);
    case Operation::resume:
      return resume(rows, segment);
    case Operation::combine_gradients:
      return cut_pass_->combine_gradients(segment);
    case Operation::restore:
    case Operation::prefetch:
      copied_bytes_ =
          fetch(rows, segment, /*back=*/false, instruction.operation == Operation::prefetch);
      return;
    case Operation::restore_back:
    case Operation::prefetch_back:
      copied_bytes_ =
          fetch(rows, segment, /*back=*/true, instruction.operation == Operation::prefetch_back);
      return;
    case Operation::start_offload:
    case Operation::start_offload_back:
      copied_bytes_ = leave(rows, segment);
      return;
    case Operation::finish_offload:
    case Operation::finish_offload_back:
      copied_bytes_ =
          offload(rows, segment, instruction.operation == Operation::finish_offload_back);
      return;
    case Operation::backward:
      return backward(rows, segment);
    case Operation::free:
      if (job_.coupled != nullptr && job_.outside == nullptr && job_.store != nullptr) {
        (two_pass_ ? two_pass_->outputs() : *whole_outputs_).forget(rows);
      }
      return cut_pass_ ? release() : free();
    case Operation::penalty:
      return penalty();
    case Operation::hand_out:
      return hand_out();
  }
}

WholeOutputs* Executor::outputs_at(Rows rows, int64_t segment) {
  return whole_outputs_ && is_last(rows, segment) ? &*whole_outputs_ : nullptr;
}

int64_t Executor::fetch(Rows rows, int64_t segment, bool back, bool ahead) {
  if (two_pass_) return two_pass_->fetch(rows, ahead);
  int64_t bytes = cut_pass_ ? cut_pass_->fetch(rows, segment, back, ahead) : 0;
  if (back && outputs_at(rows, segment) != nullptr) {
    bytes += outputs_at(rows, segment)->fetch(rows, ahead);
  }
  return bytes;
}

int64_t Executor::leave(Rows rows, int64_t segment) {
  if (two_pass_) return two_pass_->leave(rows);
  const int64_t bytes = cut_pass_ ? cut_pass_->leave(rows) : 0;
  WholeOutputs* outputs = outputs_at(rows, segment);
  return bytes + (outputs != nullptr ? outputs->leave(rows) : 0);
}

int64_t Executor::offload(Rows rows, int64_t segment, bool back) {
  if (two_pass_) return two_pass_->offload(rows);
  // A micro-batch whose segments follow each other is gone with the last of them.
  WholeOutputs* outputs = job_.alone ? nullptr : outputs_at(rows, segment);
  const int64_t bytes = cut_pass_ ? cut_pass_->offload(rows, segment, back) : 0;
  return bytes + (outputs != nullptr ? outputs->offload(rows) : 0);
}

Batch Executor::load_inputs(Rows rows) {
  const Batch given = rows_of(*job_.inputs, rows);
  const bool again = job_.cut || job_.coupled != nullptr;
  if (again && !job_.inputs->uniform && !wrote_inputs_) sources_.meet(rows, given);
  return to_device(given, job_.device);
}

void Executor::load(Rows rows) {
  if (job_.interrupt) job_.interrupt();
  learn_numbers();
  if (first_.size() == 0) first_ = rows;
  uneven_ = uneven_ || rows.size() != first_.size();
  inputs_ = load_inputs(rows);
  targets_ = load_rows(*job_.targets, rows, job_.device);
  if (job_.inputs->uniform && job_.targets->uniform) return;
  Dims dims = dims_of(inputs_);
  for (auto& leaf : dims_of(targets_)) dims.push_back(std::move(leaf));
  if (std::find(lengths_.begin(), lengths_.end(), dims) == lengths_.end()) {
    lengths_.push_back(std::move(dims));
  }
}

void Executor::examine() {
  learn_numbers();
  count_rows();
  examine(/*last=*/false);
}

void Executor::examine(bool last) {
  // A rehearsal without the loss does not know which outputs it reads.
  const bool unknown = job_.coupled != nullptr && job_.outside == nullptr && !loss_known_;
  const auto load = [&](Rows rows) { return load_rows(*job_.inputs, rows, job_.device); };
  experiment_.run(load, last, /*sure=*/!unknown);
}

void Executor::look_at(Rows rows, const Batch& inputs, const tape::Tape& tape,
                       const Batch& outputs) {
  if (experiment_.awaits(rows)) {
    experiment_.meet_others(rows.size(), inputs, tape, outputs);
  } else if (experiment_.wants(rows)) {
    experiment_.take(rows, inputs, tape);
  }
}

void Executor::stream(Rows rows) {
  if (!experiment_.wants(rows)) {
    forward(rows);
    return check_coupling(rows);
  }
  std::vector<at::Tensor> buffers;
  for (const BufferSlot& slot : job_.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers.push_back(std::move(buffer));
  }
  outputs_ = experiment_.record(rows, inputs_, buffers, [&] { return call_model(rows); });
}

void Executor::forward(Rows rows) {
  std::optional<coupled::PartOfBatch::Facts> facts;
  if (job_.exact_coupling) facts = {rows.size(), job_.batch_size(), job_.match_native_rng};
  const coupled::PartOfBatch part_of_batch(facts);
  const coupled::CouplingWatch::Scope watching(watch_);
  const std::vector<uint32_t> before = versions_of(inputs_);
  const bool part = rows.size() < job_.batch_size();
  // Streams give each micro-batch the numbers of the whole batch.
  const bool streams = cut_pass_ && cut_pass_->streams() != nullptr;
  const coupled::ForeignDraws foreign(job_.match_native_rng && !streams && part);
  {
    const CarriedState::Scope stateful(job_.exact_coupling ? state_at_work_ : nullptr, part,
                                       job_.batch_size());
    few_.watch(rows.size(), [&] { outputs_ = job_.model->forward(inputs_); });
  }
  note_own_backward();
  watch_.rethrow();
  // Provisional where forward is cut: they follow statistics of the whole batch.
  if (!cut_pass_ && state_at_work_ == &state_)
    buffers_.note_means(watch_.take_means(), rows.size());
  if (auto name = foreign.drew()) foreign_draw_ = std::move(name);
  wrote_inputs_ = wrote_inputs_ || versions_of(inputs_) != before;
}

void Executor::note_own_backward() {
  if (own_backward_ || job_.rows_seen == nullptr) return;
  // Once: backward may talk to other ranks, who need not look in the same steps.
  if (job_.rows_seen->looked > 0) return;
  own_backward_ = own_backward_of(outputs_);
}

Batch Executor::uncounted(const std::function<Batch()>& forward, bool as_first) {
  CarriedState* const counted = std::exchange(state_at_work_, nullptr);
  try {
    Batch outputs = state_.runs().uncounted(forward, as_first);
    state_at_work_ = counted;
    return outputs;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    state_at_work_ = counted;
    throw;
  }
}

Batch Executor::call_model(Rows rows) {
  forward(rows);
  check_coupling(rows);
  return std::exchange(outputs_, Batch());
}

void Executor::record(Rows rows, bool retain) {
  load(rows);
  const Batch& seen = two_pass_->first(rows, inputs_, retain, [&] { return call_model(rows); });
  if (wrote_inputs_ && two_pass_->keeps_graph_before(rows)) {
    throw Unsupported(
        "forward changes its inputs in place, which are rows of one tensor: for torch that spoils "
        "the graphs of other micro-batches that are kept; write that out of place, as in x = x - "
        "mean, or keep no graphs (retained_micro_batches=0). The rows that it ran on are changed");
  }
  if (job_.on_micro_batch) job_.on_micro_batch({rows.begin, rows.end, seen, targets_});
  const Batch inputs = without_tensors(inputs_);
  look_at(rows, inputs_, two_pass_->tape(rows), seen);
  free();
  learn_numbers();
  if (job_.learns_output_law(rows)) learn_outputs(rows, inputs, seen, two_pass_->tape(rows));
  // Buffers that were restored under a graph could belong to what it has saved.
  if (retain && (buffers_.written() || parameters_->written())) two_pass_->drop_graph(rows);
}

void Executor::whole_loss() {
  in_whole_loss_ = true;
  coupled::RandomStreams* streams = cut_pass_ ? cut_pass_->streams() : nullptr;
  if (streams != nullptr) streams->settle();
  (whole_outputs_ ? *whole_outputs_ : two_pass_->outputs()).watch_attributes(state_);
  buffers_.begin_loss();
  const LossState::Scope keeping(loss_state_);
  const at::Tensor value = whole_outputs_ ? whole_outputs_->loss(sinks_) : two_pass_->whole_loss();
  buffers_.end_loss();
  if (streams != nullptr) streams->take();
  in_whole_loss_ = false;
  loss_known_ = true;
  experiment_.read_by_loss((whole_outputs_ ? *whole_outputs_ : two_pass_->outputs()).read());
  buffers_.begin_second_pass();
  parameters_->begin_second_pass();
  total_.add(value);
}

void Executor::replay(Rows rows) {
  load(rows);
  two_pass_->again(rows, inputs_, [&] { return uncounted([&] { return call_model(rows); }); });
}

bool Executor::is_last(Rows rows, int64_t segment) const {
  return segment + 1 == (job_.checkpoints != nullptr ? segments(rows) : segments());
}

void Executor::record_for_cuts(Rows rows) {
  if (job_.interrupt) job_.interrupt();
  // A recording that is used again tells nobody how outputs follow the samples.
  if (!job_.alone && !job_.learns_output_law(rows) && cut_pass_->reuse(rows)) return;
  load(rows);
  const auto call = [&](Rows at_work) {
    forward(at_work);
    if (wrote_inputs_) {
      throw Unsupported(
          "forward changes its inputs in place, and has to run on them again (for a layer that "
          "sees the whole batch, or because one sample's activations do not fit into the budget); "
          "write that out of place, as in x = x - mean. The rows that it ran on are changed");
    }
    if (job_.alone) check_coupling(rows);
    return std::exchange(outputs_, Batch());
  };
  if (job_.alone) {
    Batch given = cut_pass_->checkpoint(rows, inputs_, [&] { return call(rows); });
    if (whole_outputs_) {
      given = whole_outputs_->add(rows, given);
      if (job_.on_micro_batch) job_.on_micro_batch({rows.begin, rows.end, given, targets_});
    }
    const Batch inputs = without_tensors(inputs_);
    look_at(rows, inputs_, cut_pass_->tape(rows), given);
    free();
    learn_numbers();
    if (job_.learns_output_law(rows)) learn_outputs(rows, inputs, given, cut_pass_->tape(rows));
    given = Batch();
    // Until a coupled loss is known the other micro-batches need the room.
    if (whole_outputs_ && job_.store != nullptr) {
      cut_pass_->offload(rows);
      whole_outputs_->offload(rows);
    }
    // Buffers that were restored under a graph could belong to what it has saved.
    if (buffers_.written()) cut_pass_->drop_graph(rows);
    return;
  }
  const Batch inputs = inputs_;
  const Batch targets = targets_;
  const auto elsewhere = [&](Rows others, const CutPass::Run& run) {
    load(others);
    run(inputs_, [&] { return uncounted([&] { return call(others); }); });
    inputs_ = inputs;
    targets_ = targets;
  };
  const auto again = [&](bool as_first) { return uncounted([&] { return call(rows); }, as_first); };
  const auto depends_on_state = [&] {
    learn_numbers(/*any=*/true);
    inputs_ = inputs;
    targets_ = targets;
    return state_.runs().counts();
  };
  const auto once = [&, recorded = false]() mutable {
    if (std::exchange(recorded, true)) state_.runs().count_anew();
    return call(rows);
  };
  const CutPass::Forward forward{once, again, depends_on_state};
  const Batch given = cut_pass_->record(rows, inputs, watch_, forward, elsewhere);
  look_at(rows, inputs, cut_pass_->tape(rows), given);
  free();
  learn_numbers();
  if (job_.learns_output_law(rows)) learn_outputs(rows, inputs, given, cut_pass_->tape(rows));
}

void Executor::load_for(Rows rows, int64_t segment) {
  if (job_.interrupt) job_.interrupt();
  if (cut_pass_->reads_inputs(rows, segment)) inputs_ = load_inputs(rows);
}

void Executor::advance(Rows rows, int64_t segment, bool retain) {
  load_for(rows, segment);
  Batch outputs = cut_pass_->advance(rows, inputs_, segment, retain);
  if (is_last(rows, segment) && job_.outside != nullptr) {
    job_.outside->take(rows, outputs);
    outputs = Batch();
  } else if (is_last(rows, segment)) {
    const Batch& seen = whole_outputs_->add(rows, outputs);
    outputs = Batch();  // its graph holds what may leave the device now
    if (job_.on_micro_batch) {
      targets_ = load_rows(*job_.targets, rows, job_.device);
      job_.on_micro_batch({rows.begin, rows.end, seen, targets_});
    }
  }
  release();
}

void Executor::resume(Rows rows, int64_t segment) {
  load_for(rows, segment);
  outputs_ = cut_pass_->resume(rows, inputs_, segment);
  if (!is_last(rows, segment)) return;
  if (job_.outside != nullptr) {
    job_.outside->compare(rows, outputs_);
  } else if (whole_outputs_) {
    whole_outputs_->compare(rows, outputs_);
  } else {
    targets_ = load_rows(*job_.targets, rows, job_.device);
  }
}

void Executor::check_coupling(Rows rows) const {
  if (job_.exact_coupling) watch_.check(rows.size(), job_.batch_size());
  if (!job_.match_native_rng || rows.size() == job_.batch_size()) return;
  const std::optional<std::string>& drew = watch_.drew() ? watch_.drew() : foreign_draw_;
  if (drew) coupled::refuse_draws(*drew, rows.size(), job_.batch_size());
}

at::Tensor Executor::loss_sum(Rows rows) const {
  if (!job_.match_native_rng || rows.size() == job_.batch_size()) {
    return job_.loss->sum(outputs_, targets_);
  }
  const coupled::RandomStreams here(devices_of(job_));
  at::Tensor sum = job_.loss->sum(outputs_, targets_);
  if (!here.untouched()) {
    throw CouplingError("loss",
                        "the loss draws random numbers for each micro-batch, so match_native_rng "
                        "does not know those of the whole batch; draw them before the step, or use "
                        "a coupled loss, which is computed once");
  }
  return sum;
}

void Executor::loss(Rows rows) {
  const LossState::Scope keeping(loss_state_);
  try {
    few_for_loss_.watch(rows.size(), [&] { share_ = denominator_->divide(loss_sum(rows)); });
  } catch (...) {
    if (rows.size() < job_.batch_size() && coupled::may_be_of_rows(std::current_exception())) {
      explain_compared(outputs_, targets_, rows.size(), job_.batch_size());
    }
    throw;
  }
  experiment_.read_by(share_);
  note_read();
  const at::NoGradGuard no_grad;
  total_.add(share_);
  if (job_.on_micro_batch) {
    job_.on_micro_batch({rows.begin, rows.end, detach(outputs_), targets_});
  }
  if (job_.keep_outputs) {
    kept_.push_back(detach(outputs_));
    kept_rows_.push_back(rows.size());
  }
  // The graph holds what backward needs of them.
  outputs_ = Batch();
}

void Executor::differentiate(const at::Tensor& share, const std::vector<at::Tensor>& except) {
  if (!share.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on anything that requires grad; check that the model's "
        "parameters "
        "require grad and that its outputs are not detached");
  }
  sinks_.redirect_other_leaves({share}, except);
  at::Tensor gradient = job_.loss_scale.defined()
                            ? job_.loss_scale.to(share.device(), share.scalar_type()).reshape({})
                            : at::ones_like(share);
  autograd::run_backward_of_part({share}, {gradient});
}

void Executor::backward(Rows rows, int64_t segment) {
  if (two_pass_) return two_pass_->backward(rows);
  if (!cut_pass_) return differentiate(share_);
  if (!is_last(rows, segment) || job_.outside != nullptr || whole_outputs_) {
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> gradients;
    const Batch outputs = std::exchange(outputs_, Batch());
    for (size_t i = 0; i < outputs.leaves().size(); ++i) {
      const at::Tensor& output = outputs.leaves()[i].tensor;
      if (!output.defined() || !output.requires_grad()) continue;
      at::Tensor gradient = gradient_of(rows, i, output);
      if (!gradient.defined()) continue;  // the loss ignores this output
      roots.push_back(output);
      gradients.push_back(std::move(gradient));
    }
    cut_pass_->backward(rows, segment, std::move(roots), std::move(gradients));
    if (job_.outside != nullptr) job_.outside->collect(rows, inputs_);
    return;
  }
  differentiate(share_, cut_pass_->leaves());
  cut_pass_->collect(rows, segment);
}

at::Tensor Executor::gradient_of(Rows rows, size_t leaf, const at::Tensor& output) {
  if (!seeds_.empty()) return seeds_[leaf];
  if (job_.outside != nullptr) return job_.outside->gradient(rows, leaf, output);
  return whole_outputs_->gradient(rows, leaf, output.device());
}

void Executor::free() {
  if (two_pass_) two_pass_->free();
  release();
  buffers_.end_micro_batch();
  parameters_->end_micro_batch();
}

void Executor::commit() {
  apart_ = true;
  buffers_.commit();
  parameters_->commit();
  apart_ = false;
  state_.runs().commit();
}

void Executor::seed() {
  seeds_ = stand_in_gradients(outputs_);
}

void Executor::release() {
  share_.reset();
  seeds_.clear();
  if (cut_pass_) cut_pass_->free();
  outputs_ = Batch();  // where what was to read them has failed
  inputs_ = Batch();
  targets_ = Batch();
  at::autocast::clear_cache();
  sinks_.forget_dead_leaves();
}

void Executor::penalty() {
  if (job_.loss->has_penalty()) {
    at::Tensor term = job_.loss->penalty().reshape({});
    total_.add(term);
    differentiate(term);
  }
}

void Executor::hand_out() {
  count_rows();
  look_at_rows();
  commit();
  // Whatever can fail comes first: a hand-out cannot be taken back.
  examine(/*last=*/true);
  if (differ_) std::rethrow_exception(differ_);
  finish();
  few_.forget();
  // Hooks may draw too.
  if (cut_pass_ && cut_pass_->streams() != nullptr) cut_pass_->streams()->settle();
  sinks_.hand_out();
}

void Executor::finish() {
  final_loss_ = total_.get();
  if (cut_pass_) cut_pass_->confirm_replays();
  if (two_pass_) {
    two_pass_->check();
    if (job_.keep_outputs) final_outputs_ = two_pass_->outputs().all();
    return;
  }
  if (whole_outputs_) {
    if (whole_outputs_->differ()) {
      const std::string part =
          job_.alone ? "forward" : "the part of forward after the last op of the whole batch";
      throw Unsupported(part +
                        " gave other outputs when it was replayed, so its gradient would not "
                        "belong to the loss; a kernel in it is not deterministic");
    }
    if (job_.keep_outputs) final_outputs_ = whole_outputs_->all();
    return;
  }
  if (!job_.keep_outputs) return;
  check_plain_leaves(kept_, kept_rows_, /*other_sizes=*/false);
  final_outputs_ = concatenate(std::move(kept_), kept_rows_, "outputs");
}

void Executor::finish_forward() {
  commit();
  if (cut_pass_->streams() != nullptr) cut_pass_->streams()->settle();
  examine(/*last=*/true);
  if (differ_) std::rethrow_exception(differ_);
  sinks_.uninstall();
  watch_.renormed()->commit();
  watch_.close();
}

void Executor::begin_backward(bool keep) {
  sinks_.install();
  cut_pass_->begin_backward(keep);
}

void Executor::roll_back() {
  const Unwatched unwatched;
  sinks_.uninstall();
  // What the loss found comes first: forwards had been at the model's own state before.
  std::exception_ptr lost;
  try {
    loss_state_.roll_back();
  } catch (...) {
    lost = std::current_exception();
  }
  buffers_.roll_back();
  parameters_->roll_back();
  watch_.memory().undo();
  watch_.renormed()->undo();
  state_.roll_back();
  watch_.undo_draws();
  if (lost) std::rethrow_exception(lost);
}

at::Tensor Executor::loss() const {
  return final_loss_.defined() ? final_loss_ : total_.get();
}

std::optional<std::string> Executor::collective() const {
  if (two_pass_) return two_pass_->outputs().collective();
  return whole_outputs_ ? whole_outputs_->collective() : std::nullopt;
}

std::optional<std::string> Executor::opaque() const {
  return two_pass_ ? two_pass_->opaque() : std::nullopt;
}

std::optional<Batch> Executor::take_outputs() {
  if (job_.keep_outputs && !final_outputs_) finish();
  return std::exchange(final_outputs_, std::nullopt);
}

}  // namespace infinitybatch
