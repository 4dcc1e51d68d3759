// The part of Program that records a forward whose graph would not fit: what an op saves is let go
// of when it has run, and what waits at known cuts is kept.
#include "program.hpp"

#include <infinitybatch/tape/arguments.hpp>

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

namespace infinitybatch::tape {
namespace {

/// Lets go of what the graph nodes that were made since `first` have saved.
void release_saved(const at::Tensor& tensor, uint64_t first) {
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    // Accumulators are no op's.
    if (node == nullptr || node->sequence_nr() < first) return;
    if (dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr) return;
    open.push_back(node);
  };
  visit(tensor.grad_fn().get());
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    node->release_variables();
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
}

}  // namespace

void Program::begin_cost() {
  first_node_ = at::sequence_number::peek();
  live_ = memory::stats(*light).live;
  rise_.emplace(*light);
}

void Program::end_cost(c10::ArrayRef<c10::IValue> outputs) {
  OpCost cost;
  cost.kept = std::max<int64_t>(0, memory::stats(*light).live - live_);
  cost.rise = std::max<int64_t>(cost.kept, rise_->peak() - live_);
  rise_.reset();
  Costs& costs = tape_.costs;
  costs.ops.resize(tape_.ops.size());  // restores cost nothing
  cost.saves.begin = cost.saves.end = static_cast<uint32_t>(costs.saves.size());
  costs.ops.push_back(cost);
  if (frontiers.tail) return;
  const std::vector<Holders> before = holders();
  const auto release = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.requires_grad()) release_saved(tensor, first_node_);
  };
  for (const c10::IValue& output : outputs) {
    if (output.isTensor()) release(output.toTensor());
    if (!output.isTensorList()) continue;
    for (const c10::IValue& element : output.toListRef()) release(element.toTensor());
  }
  const std::vector<Holders> after = holders();
  for (size_t i = 0; i < before.size(); ++i) {
    if (after[i].of_tensor < before[i].of_tensor || after[i].of_memory < before[i].of_memory) {
      costs.saves.push_back(before[i].value);
    }
  }
  costs.ops.back().saves.end = static_cast<uint32_t>(costs.saves.size());
}

/// Who holds the arguments and results of the op at work. What its graph nodes have saved, as it is
/// or as a view, has more holders before they let go than afterwards.
std::vector<Program::Holders> Program::holders() const {
  std::vector<Holders> all;
  const auto count = [&](ValueId id) {
    const Value& value = values_[id];
    if (value.memory == nullptr) return;
    all.push_back({id, value.impl.use_count(), value.memory->storage.use_count()});
  };
  for_each_argument(tape_, op_, [&](ValueId value, const Slot&) { count(value); });
  for (uint32_t o = op_.outputs.begin; o < op_.outputs.end; ++o) {
    if (tape_.outputs[o] != kNoValue) count(tape_.outputs[o]);
  }
  return all;
}

void Program::keep_frontier() {
  const size_t cut = frontiers.random.size();
  if (cut >= guide.places.size() || tape_.ops.size() != guide.places[cut].op) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  for (const FrontierGuide::Given& given : guide.places[cut].gives) {
    if (given.value >= values_.size()) continue;
    const at::Tensor tensor(values_[given.value].impl.lock());
    if (!tensor.defined()) continue;
    const Crossing crossing{given.value, static_cast<int32_t>(cut)};
    const bool copy = given.changed || is_put_back(tensor);
    frontiers.waiting[crossing] = copy ? tensor.detach().clone() : tensor.detach();
    if (tensor.requires_grad()) frontiers.differentiable.insert(crossing);
  }
  frontiers.random.emplace_back();
  if (guide.places[cut].draws) frontiers.random.back() = generators_.now();
  if (reached) reached(frontiers, static_cast<int32_t>(cut));
  if (keeps_tail && frontiers.random.size() == guide.places.size()) begin_tail();
}

/// Whether it lies in a buffer that forward has written: whoever calls forward restores it.
bool Program::is_put_back(const at::Tensor& tensor) {
  const Memory* memory = memories_.find(tensor);
  if (memory == nullptr || memory->made_here) return false;
  return std::any_of(memory->values.begin(), memory->values.end(), [&](ValueId alias) {
    const int64_t index = values_[alias].external;
    return index >= 0 && tape_.externals[static_cast<size_t>(index)].before.defined();
  });
}

/// From here on the graph is one that the last segment's replay would build: it begins at leaves
/// of its own.
void Program::begin_tail() {
  std::vector<std::pair<Take, at::Tensor>> taken;
  for (const Take& take : guide.last) {
    if (take.from.giver < 0) continue;  // found by the model: without a history
    if (take.from.value >= values_.size()) return;
    at::Tensor tensor(values_[take.from.value].impl.lock());
    if (!tensor.defined()) return;
    if (!tensor.requires_grad()) continue;
    // A write into a view gives its base another node, which leads in front of the cut.
    if (take.written && tensor.is_view()) return;
    taken.emplace_back(take, std::move(tensor));
  }
  for (const auto& [take, tensor] : taken) {
    const at::Tensor start = tensor.detach().requires_grad_();
    separated_.push_back(tensor.grad_fn());
    {
      // Not at the leaf's own accumulator: that would hide hooks which are set from here on.
      const at::AutoGradMode grad_mode(true);
      compat::begin_history(tensor, at::alias(start));
    }
    separated_.push_back(tensor.grad_fn());
    values_[take.from.value].provenance = Provenance::of(tensor);
    frontiers.starts.emplace_back(take.from, start);
  }
  // Casts that autocast made before lead in front of the cut.
  if (Modes::current().in_autocast) at::autocast::clear_cache();
  casts_.clear();
  frontiers.tail = true;
}

}  // namespace infinitybatch::tape
