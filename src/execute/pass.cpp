#include "execute/pass.hpp"

#include "autograd/engine.hpp"
#include "core/batch_form.hpp"
#include "execute/checkpoints.hpp"
#include "execute/external_loss.hpp"
#include "execute/separable_share.hpp"
#include "execute/static_tapes.hpp"
#include "execute/whole_outputs.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

void add(GraphBytes& sum, const GraphBytes& bytes) {
  sum.offloaded += bytes.offloaded;
  sum.stayed += bytes.stayed;
}

bool keeps_graph(const std::pair<const int64_t, RepeatableForward>& entry) {
  return entry.second.keeps_graph();
}

}  // namespace

Pass::Pass(const Setup& setup, autograd::GradientSinks& sinks, BufferRule& buffers,
           SeparableShare* share, WholeOutputs* whole)
    : problem_(setup.problem),
      strategy_(setup.strategy),
      resources_(setup.resources),
      sinks_(sinks),
      buffers_(buffers),
      share_(share),
      whole_(whole),
      model_(setup),
      numbers_(problem_.match_native_rng && strategy_.is_cut() && !strategy_.per_micro_batch(),
               model_.devices),
      ops_(problem_, *resources_.findings, numbers_),
      coupled_(model_, buffers, numbers_, ops_),
      checkpoints_(model_),
      comparison_(setup, whole) {}

const Batch& Pass::first(Rows rows, const Batch& inputs, bool keep, Batch* told,
                         const std::function<Batch()>& forward) {
  RepeatableForward& micro_batch = uncut_.try_emplace(rows.begin, model_, rows).first->second;
  Batch outputs = micro_batch.first(inputs, keep, told != nullptr, forward);
  if (told != nullptr) *told = without_graph(outputs);
  ExternalLoss* const loss = problem_.loss.external();
  if (loss != nullptr) {
    outputs = loss->take(rows, inputs, std::move(outputs));
  } else {
    whole_->add(rows, outputs);
  }
  if (keep) micro_batch.keep_graph(std::move(outputs), loss != nullptr ? inputs : Batch());
  return seen(rows);
}

Batch Pass::resume(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  RepeatableForward& micro_batch = uncut_.at(rows.begin);
  if (problem_.loss.external() != nullptr) input_leaves_ = inputs.tensors();
  if (micro_batch.keeps_graph()) return micro_batch.take_graph();
  const bool replays = micro_batch.replays();
  if (!replays) opaque_ = micro_batch.opaque();
  Batch outputs = micro_batch.second(inputs, forward);
  replayed_ = replayed_ || replays;
  comparison_.compare(rows, outputs);
  return outputs;
}

bool Pass::drop_graphs() {
  if (kept_graphs() == 0) return false;
  for (auto& [begin, micro_batch] : uncut_) micro_batch.drop_graph();
  return true;
}

int64_t Pass::kept_graphs() const {
  return std::count_if(uncut_.begin(), uncut_.end(), keeps_graph);
}

bool Pass::keeps_graph_before(Rows rows) const {
  return std::any_of(uncut_.begin(), uncut_.lower_bound(rows.begin), keeps_graph);
}

const Batch* Pass::inputs_of_graph(Rows rows) const {
  const RepeatableForward& micro_batch = uncut_.at(rows.begin);
  return micro_batch.keeps_graph() ? &micro_batch.inputs_of_graph() : nullptr;
}

GraphBytes Pass::kept_graph_bytes() const {
  GraphBytes sum;
  for (const auto& [begin, micro_batch] : uncut_) {
    if (micro_batch.keeps_graph()) add(sum, micro_batch.graph_bytes());
  }
  return sum;
}

std::optional<std::string> Pass::will_run_again() const {
  for (const auto& [begin, micro_batch] : uncut_) {
    if (micro_batch.opaque()) return micro_batch.opaque();
  }
  return std::nullopt;
}

CutMicroBatch& Pass::begin(Rows rows, std::shared_ptr<const Recorded> recorded,
                           StaticTapes* lent_by) {
  StandIns* const ops = strategy_.per_micro_batch() ? nullptr : &ops_;
  CutMicroBatch micro_batch(rows, std::move(recorded), ops, lent_by);
  return cut_.insert_or_assign(rows.begin, std::move(micro_batch)).first->second;
}

Batch Pass::record(Rows rows, const Batch& inputs, coupled::CouplingWatch& watch,
                   const RecordableForward& forward) {
  CoupledRecorder::Recording made = coupled_.record(rows, inputs, watch, forward);
  begin(rows, std::move(made.recorded));
  return std::move(made.outputs);
}

bool Pass::reuse(Rows rows) {
  std::shared_ptr<const Recorded> recorded = coupled_.reuse(rows);
  if (!recorded) return false;
  begin(rows, std::move(recorded), resources_.static_tapes);
  return true;
}

Batch Pass::checkpoint(Rows rows, const Batch& inputs, const std::function<Batch()>& forward) {
  CheckpointRecorder::Recording made = checkpoints_.record(rows, inputs, forward);
  CutMicroBatch& micro_batch = begin(rows, std::move(made.recorded));
  if (made.saved) {
    micro_batch.stand_at(std::move(*made.saved));
    return std::move(made.outputs);
  }
  // Segments that nobody has replayed yet: the outputs have to come out bit for bit.
  if (problem_.loss.separable() != nullptr) comparison_.expect(rows, detached(made.outputs));
  if (!resources_.checkpoints->forget && !resources_.checkpoints->again) {
    advance_to(micro_batch, inputs, micro_batch.segments() - 1);
  }
  return std::move(made.outputs);
}

int64_t Pass::segments() const {
  if (strategy_.per_micro_batch() && !cut_.empty()) return cut_.begin()->second.segments();
  return ops_.count() + 1;
}

Stretches Pass::stretches(Rows rows) const {
  const Recorded& recorded = cut_.at(rows.begin).recorded();
  Stretches ends(recorded.stretches.begin() + 1, recorded.stretches.end());
  ends.push_back(static_cast<int64_t>(recorded.segments.size()));
  return ends;
}

const tape::Tape& Pass::tape(Rows rows) const {
  return strategy_.is_cut() ? cut_.at(rows.begin).recorded().tape : uncut_.at(rows.begin).tape();
}

bool Pass::is_made_again(const CutMicroBatch& micro_batch, int64_t segment) const {
  if (!strategy_.checkpoints()) return false;
  if (resources_.checkpoints->forget) return true;
  const bool at_once = !strategy_.per_micro_batch() || resources_.checkpoints->again;
  return at_once && segment == micro_batch.recorded().last_beside(segment);
}

bool Pass::reads_inputs(Rows rows, int64_t segment) const {
  const CutMicroBatch& micro_batch = cut_.at(rows.begin);
  if (strategy_.per_micro_batch() && micro_batch.keeps_graph(segment)) return false;
  const bool again = is_made_again(micro_batch, segment);
  const int64_t first = again ? micro_batch.recorded().first_beside(segment) : segment;
  return micro_batch.reads_inputs(first, segment);
}

void Pass::advance_to(CutMicroBatch& micro_batch, const Batch& inputs, int64_t segment) const {
  micro_batch.advance_to(inputs, segment, resources_.checkpoints->forget,
                         strategy_.offloads() ? resources_.store : nullptr);
}

Batch Pass::advance(Rows rows, const Batch& inputs, int64_t segment, bool retain, bool leave) {
  CutMicroBatch& micro_batch = cut_.at(rows.begin);
  PlayedSegment played = micro_batch.go_through(inputs, segment);
  micro_batch.tell_written(segment, played, buffers_);
  if (leave || !micro_batch.recorded().begins_stretch(segment)) micro_batch.leave(segment);
  micro_batch.give_op_behind(inputs, segment);
  Batch outputs;
  if (micro_batch.is_last(segment)) {
    outputs = tape::result_of(micro_batch.recorded().tape, played.values);
  }
  if (retain) micro_batch.keep_graph(segment, std::move(played));
  return outputs;
}

void Pass::recompute(Rows rows, const Batch& inputs, int64_t segment, bool leave) {
  CutMicroBatch& micro_batch = cut_.at(rows.begin);
  micro_batch.go_through(inputs, segment);
  if (leave) micro_batch.leave(segment);
}

Batch Pass::resume(Rows rows, const Batch& inputs, int64_t segment) {
  CutMicroBatch& micro_batch = cut_.at(rows.begin);
  if (problem_.loss.external() != nullptr) input_leaves_ = inputs.tensors();
  const bool last = micro_batch.is_last(segment);
  if (is_made_again(micro_batch, segment)) advance_to(micro_batch, inputs, segment);
  const bool kept = micro_batch.keeps_graph(segment);
  work_ = micro_batch.graph_of(inputs, segment);
  if (!last) {
    micro_batch.correct_behind(inputs, segment, work_, sinks_);
    return {};
  }
  // With a separable loss this is the last segment's only pass.
  if (!kept) micro_batch.tell_written(segment, work_, buffers_);
  Batch outputs = tape::result_of(micro_batch.recorded().tape, work_.values);
  work_.values.clear();
  comparison_.compare(rows, outputs);
  return outputs;
}

void Pass::collect(Rows rows, int64_t segment) {
  if (segment == kWhole) return;  // its leaves are the sinks'
  CutMicroBatch& micro_batch = cut_.at(rows.begin);
  micro_batch.collect(segment, work_);
  // Then nothing of it is used again.
  if (segment == 0 && strategy_.per_micro_batch()) cut_.erase(rows.begin);
}

void Pass::drop_graph(Rows rows) {
  if (strategy_.is_cut()) return cut_.at(rows.begin).drop_graphs();
  uncut_.at(rows.begin).drop_spoilt_graph();
}

void Pass::begin_backward(bool keep, bool repeatable) {
  replayed_ = false;
  ops_.begin_backward(keep || repeatable);
  for (auto& [begin, micro_batch] : cut_) micro_batch.begin_backward(keep);
}

void Pass::begin_again() {
  for (auto& [begin, micro_batch] : cut_) micro_batch.begin_again();
}

std::vector<at::Tensor> Pass::leaves() const {
  std::vector<at::Tensor> leaves = work_.op_leaves;
  for (const auto& [crossing, leaf] : work_.leaves) leaves.push_back(leaf);
  leaves.insert(leaves.end(), input_leaves_.begin(), input_leaves_.end());
  return leaves;
}

void Pass::seed(const Batch& outputs) {
  seeds_ = stand_in_gradients(outputs);
}

at::Tensor Pass::gradient(Rows rows, size_t leaf, const at::Tensor& output) const {
  if (!seeds_.empty()) return seeds_[leaf];
  if (ExternalLoss* loss = problem_.loss.external()) return loss->gradient(rows, leaf, output);
  return whole_->gradient(rows, leaf, output.device());
}

void Pass::backward(Rows rows, int64_t segment, Batch outputs) {
  if (share_ != nullptr && is_last(rows, segment)) {
    if (segment == kWhole) sinks_.next_micro_batch();
    share_->differentiate(leaves());
    return collect(rows, segment);
  }
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& output = outputs.leaves()[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor gradient = this->gradient(rows, i, output);
    if (!gradient.defined()) continue;  // the loss ignores it
    roots.push_back(output);
    gradients.push_back(std::move(gradient));
  }
  if (segment != kWhole) cut_.at(rows.begin).take_gradients(segment, work_, roots, gradients);
  // The graph keeps what it needs of them.
  outputs = Batch();
  work_.values.clear();
  if (!roots.empty()) {
    sinks_.redirect_other_leaves(roots, leaves(), /*once=*/true);
    autograd::run_backward_of_part(roots, gradients);
  }
  collect(rows, segment);
}

void Pass::free() {
  work_ = PlayedSegment();
  input_leaves_.clear();
  seeds_.clear();
}

Batch& Pass::seen(Rows rows) {
  ExternalLoss* const loss = problem_.loss.external();
  return loss != nullptr ? loss->taken(rows) : whole_->of(rows);
}

int64_t Pass::restore(Rows rows, int64_t segment, bool back, bool ahead) {
  const int64_t bytes = segment == kWhole ? uncut_.at(rows.begin).restore_graph(ahead)
                                          : cut_.at(rows.begin).restore(segment, back, ahead);
  WholeOutputs* const outputs = back ? outputs_beside(rows, segment) : nullptr;
  return bytes + (outputs != nullptr ? outputs->fetch(rows, ahead) : 0);
}

int64_t Pass::start_offload(Rows rows, int64_t segment) {
  int64_t bytes = 0;
  if (segment != kWhole) {
    bytes = cut_.at(rows.begin).start_offload(*resources_.store);
  } else if (uncut_.at(rows.begin).offloads_graph()) {
    return uncut_.at(rows.begin).start_offload(seen(rows));
  }
  WholeOutputs* const outputs = outputs_beside(rows, segment);
  return bytes + (outputs != nullptr ? outputs->leave(rows) : 0);
}

int64_t Pass::finish_offload(Rows rows, int64_t segment, bool back) {
  if (segment == kWhole) {
    RepeatableForward& micro_batch = uncut_.at(rows.begin);
    const int64_t bytes = micro_batch.offloads_graph() ? finish_offload(micro_batch) : 0;
    return bytes + (whole_ != nullptr ? whole_->offload(rows) : 0);
  }
  const auto found = cut_.find(rows.begin);
  if (found == cut_.end()) return 0;  // nothing of it is used again
  // A micro-batch whose segments follow each other is gone with the last of them.
  WholeOutputs* const outputs =
      strategy_.per_micro_batch() ? nullptr : outputs_beside(rows, segment);
  const int64_t bytes = finish_offload(found->second, segment, back);
  return bytes + (outputs != nullptr ? outputs->offload(rows) : 0);
}

int64_t Pass::finish_offload(RepeatableForward& forward) {
  const int64_t bytes = forward.finish_offload(seen(forward.rows()));
  if (whole_ != nullptr) whole_->compare_none(forward.rows());
  add(graph_bytes_, forward.graph_bytes());
  return bytes;
}

int64_t Pass::finish_offload(CutMicroBatch& micro_batch, int64_t segment, bool back) const {
  offload::Store& store = *resources_.store;
  const Recorded& recorded = micro_batch.recorded();
  const int64_t end = back ? recorded.first_beside(segment) : recorded.last_beside(segment);
  if (segment == end) return micro_batch.finish_offload(store);
  return micro_batch.offload_but_for(store, back ? segment - 1 : segment + 1, back);
}

}  // namespace infinitybatch
