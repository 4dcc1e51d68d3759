// The part of Program that records a forward whose graph would not fit: what an op saves is let go
// of when it has run, and what waits at known cuts is kept.
#include "tape/arguments.hpp"
#include "tape/program.hpp"

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <utility>

namespace infinitybatch::tape {
namespace {

using Nodes = ska::flat_hash_set<const torch::autograd::Node*>;

/// Lets go of what the graph nodes behind `tensor` that were made since `first` have saved.
/// \param seen nodes that have been there already
void release_saved(const at::Tensor& tensor, uint64_t first, Nodes& seen) {
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    // Accumulators are no op's.
    if (node == nullptr || node->sequence_nr() < first) return;
    if (dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr) return;
    if (seen.insert(node).second) open.push_back(node);
  };
  visit(standing_node(tensor));
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    node->release_variables();
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
}

/// Tensors that stand at a leaf for a while. It may be the graph of somebody else's that they lead
/// into afterwards: what user code keeps of a forward must look as it does natively.
class Histories {
 public:
  Histories() = default;
  Histories(const Histories&) = delete;
  Histories& operator=(const Histories&) = delete;
  ~Histories() {
    for (const Entry& entry : entries_) {
      const at::Tensor tensor(entry.impl.lock());
      if (tensor.defined() && stands(tensor, entry)) {
        torch::autograd::impl::set_gradient_edge(tensor, entry.before);
      }
    }
  }

  void begin(const at::Tensor& tensor, const at::Tensor& start) {
    Entry entry{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                torch::autograd::impl::gradient_edge(tensor), nullptr};
    {
      // Not at the leaf's own accumulator: that would hide hooks which are set from here on.
      const at::AutoGradMode grad_mode(true);
      // The op at work may be one that runs below autograd, as those that make tensors do
      // (torch.arange): no history would begin there.
      const auto [included, excluded] = c10::impl::tls_local_dispatch_key_set();
      const c10::impl::ForceDispatchKeyGuard with_autograd(
          included, excluded - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      compat::begin_history(tensor, at::alias(start));
    }
    entry.given = tensor.grad_fn();
    entries_.push_back(std::move(entry));
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> impl;
    torch::autograd::Edge before;
    compat::NodePtr given;
  };

  /// Whether nobody has written it since, which would give it another history.
  static bool stands(const at::Tensor& tensor, const Entry& entry) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && meta->grad_fn_ == entry.given && !is_stale_view(tensor);
  }

  std::vector<Entry> entries_;
};

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32u);
}

uint64_t mix(uint64_t hash, const Tape& tape, const Op& op) {
  hash = mix(hash, reinterpret_cast<uintptr_t>(op.facts));
  for (uint32_t s = op.slots.begin; s < op.slots.end; ++s) {
    const Slot& slot = tape.slots[s];
    hash = mix(hash, static_cast<uint64_t>(slot.argument) << 8u | static_cast<uint64_t>(slot.kind));
    if (slot.kind == Slot::Kind::tensor) {
      hash = mix(hash, slot.first);
      continue;
    }
    hash = mix(hash, slot.count);
    for (uint32_t e = 0; e < slot.count; ++e) hash = mix(hash, tape.elements[slot.first + e]);
  }
  for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) hash = mix(hash, tape.outputs[o]);
  return hash;
}

}  // namespace

void Program::begin_cost() {
  first_node_ = at::sequence_number::peek();
  live_ = memory::live(*light);
  rise_.emplace(*light);
}

void Program::end_cost(c10::ArrayRef<c10::IValue> outputs) {
  OpCost cost;
  cost.kept = std::max<int64_t>(0, memory::live(*light) - live_);
  cost.rise = std::max<int64_t>(cost.kept, rise_->peak() - live_);
  rise_.reset();
  Costs& costs = tape_.costs;
  costs.ops.resize(tape_.ops.size());  // restores cost nothing
  cost.saves.begin = cost.saves.end = static_cast<uint32_t>(costs.saves.size());
  costs.ops.push_back(cost);
  const std::vector<Holders> before = holders();
  if (frontiers.tail) {
    // It may save any of them.
    for (const Holders& each : before) costs.saves.push_back(each.value);
    costs.ops.back().saves.end = static_cast<uint32_t>(costs.saves.size());
    return;
  }
  Nodes seen;
  const auto release = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.requires_grad()) release_saved(tensor, first_node_, seen);
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

/// Takes down which ops went by.
void Program::note_program() {
  Fingerprints& program = frontiers.program;
  if (program.empty()) program.push_back(0);
  while (program.size() <= tape_.ops.size()) {
    program.push_back(mix(program.back(), tape_, tape_.ops[program.size() - 1]));
  }
}

/// In front of each op. A guide is believed no further than the programs are the same: its numbers
/// of values are anybody's in another one.
void Program::follow_guide() {
  note_program();
  if (astray_ || guide.places.empty()) return;
  const size_t here = tape_.ops.size();
  if (here + 1 >= guide.program.size() || guide.program[here] != frontiers.program[here]) {
    leave_guide();
  } else {
    keep_frontier();
  }
}

void Program::leave_guide() {
  astray_ = true;
  frontiers.waiting.clear();
  frontiers.differentiable.clear();
  frontiers.random.clear();
  if (frontiers.tail) {
    Nodes seen;
    for (const Value& value : values_) {
      const at::Tensor tensor(value.impl.lock());
      if (tensor.defined() && tensor.requires_grad()) release_saved(tensor, first_of_tail_, seen);
    }
    frontiers.tail = false;
    frontiers.histories.reset();
    for (const auto& [crossing, start] : std::exchange(frontiers.starts, {})) {
      Value& value = values_[crossing.value];
      const at::Tensor tensor(value.impl.lock());
      if (tensor.defined()) look_again(value, tensor);
    }
  }
  if (reached) reached(frontiers, -1);
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
    // Only what this forward made: a parameter, or what the caller holds, stays what it is.
    if (tensor.is_leaf() || values_[take.from.value].external >= 0) return;
    // A write into a view gives its base another node, which leads in front of the cut.
    if ((take.written && tensor.is_view()) || is_stale_view(tensor)) return;
    taken.emplace_back(take, std::move(tensor));
  }
  const auto histories = std::make_shared<Histories>();
  first_of_tail_ = at::sequence_number::peek();
  for (const auto& [take, tensor] : taken) {
    const at::Tensor start = tensor.detach().requires_grad_();
    separated_.push_back(tensor.grad_fn());
    histories->begin(tensor, start);
    separated_.push_back(tensor.grad_fn());
    values_[take.from.value].provenance = Provenance::of(tensor);
    frontiers.starts.emplace_back(take.from, start);
  }
  frontiers.histories = histories;
  // Casts that autocast made before lead in front of the cut.
  if (Modes::current().in_autocast) at::autocast::clear_cache();
  casts_.clear();
  frontiers.tail = frontiers.guessed = true;
}

}  // namespace infinitybatch::tape
