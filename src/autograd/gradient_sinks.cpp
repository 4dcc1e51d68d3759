#include "autograd/gradient_sinks.hpp"

#include "autograd/engine.hpp"
#include "autograd/node_at_work.hpp"
#include "autograd/weight_product.hpp"
#include "core/engine_error.hpp"
#include "core/foreign_exception.hpp"
#include "core/torch_compat.hpp"
#include "core/unwatched.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

namespace infinitybatch::autograd {

using compat::NodePtr;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Watcher = std::function<void(const SinkEvent&)>;

namespace {

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

const void* address(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return nullptr;
  return tensor.unsafeGetTensorImpl()->has_storage() ? tensor.storage().data() : nullptr;
}

int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.is_sparse()) return bytes_of(tensor._indices()) + bytes_of(tensor._values());
  return tensor.unsafeGetTensorImpl()->has_storage()
             ? static_cast<int64_t>(tensor.storage().nbytes())
             : static_cast<int64_t>(tensor.nbytes());
}

}  // namespace

/// A buffer and whose it is. Shared with the graph, which may outlive the step in user code's
/// hands.
struct GradientSinks::Slot {
  explicit Slot(const at::Tensor& owner) : variable(owner.getIntrusivePtr()) {}

  /// Undefined where the leaf is gone: then nobody can read its gradient either.
  at::Tensor lock() const {
    auto impl = variable.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }

  void set_open(bool now) {
    const std::lock_guard<std::mutex> lock(mutex);
    open = now;
  }

  std::mutex mutex;  // the engine may run several device threads
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> variable;
  at::Tensor buffer;
  std::shared_ptr<Watcher> watcher;
  std::shared_ptr<NormCounter> norms;  // of parameters, where somebody asks
  int64_t counted_for = 0;             // the micro-batch whose gradient came in last
  std::thread::id thread = std::this_thread::get_id();
  bool open = true;
};

/// The graph's end: stands where torch's AccumulateGrad would stand.
class GradientSinks::Sink : public Node {
 public:
  Sink(const at::Tensor& variable, std::shared_ptr<Slot> slot)
      : Node(/*sequence_nr=*/UINT64_MAX), slot_(std::move(slot)) {
    add_input_metadata(variable);
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {};
    std::lock_guard<std::mutex> lock(slot_->mutex);
    const at::Tensor variable = leaf();
    if (!variable.defined()) return {};
    add(variable, gradients[0]);
    return {};
  }

  /// Whether the gradient, where it is a product of two matrices, may be added to the sum as it is
  /// computed.
  bool takes_products() const {
    const at::Tensor variable = slot_->lock();
    const bool plain = variable.defined() && variable.layout() == at::kStrided &&
                       !variable.unsafeGetTensorImpl()->is_python_dispatch();
    return plain && !slot_->norms && variable.dim() == 2 && variable.is_contiguous() &&
           (variable.scalar_type() == at::kFloat || variable.scalar_type() == at::kDouble);
  }

  void add_product(const at::Tensor& left, const at::Tensor& right) {
    std::lock_guard<std::mutex> lock(slot_->mutex);
    const at::Tensor variable = leaf();
    if (!variable.defined()) return;
    at::Tensor& buffer = slot_->buffer;
    const auto fits = [&](const at::Tensor& factor) {
      return factor.layout() == at::kStrided && !factor._is_zerotensor() &&
             factor.scalar_type() == variable.scalar_type();
    };
    if (!fits(left) || !fits(right) || (buffer.defined() && buffer.layout() != at::kStrided)) {
      at::Tensor product = left.mm(right);
      return add(variable, product);
    }
    const bool first = !buffer.defined();
    if (first) buffer = at::empty(variable.sizes(), variable.options());
    // Told first: what the product takes meanwhile comes after its sum has been made.
    tell({nullptr, address(buffer), bytes_of(buffer), /*product=*/true});
    first ? at::mm_out(buffer, left, right) : buffer.addmm_(left, right);
  }

  std::string name() const override { return "infinitybatch::GradientSink"; }

  /// Whether other sinks may stand inside: those of a node that gives its gradients here.
  bool is_around() const {
    return slot_->thread == std::this_thread::get_id() || NodeAtWork::leads_to(*this);
  }

 private:
  /// Whose gradient comes in; undefined where it is gone.
  at::Tensor leaf() const {
    if (!slot_->open) {
      throw_through_engine(std::make_exception_ptr(StateError(
          "backward reaches the graph of one micro-batch, through a tensor that somebody kept of "
          "its "
          "forward (in an attribute, a hook, a closure, a callback): the gradient would be that of "
          "its samples alone. Return the tensor as an output of the model, or detach what is "
          "kept")));
    }
    return slot_->lock();
  }

  void add(const at::Tensor& variable, at::Tensor& gradient) {
    if (slot_->norms) slot_->norms->add(gradient, slot_->counted_for);
    const void* incoming = address(gradient);
    if (is_half(gradient)) {
      add_half(variable, gradient);
    } else {
      compat::accumulate(variable, slot_->buffer, gradient, /*references=*/1);
    }
    // A sum of sparse gradients keeps all their entries: it would grow with the logical batch.
    if (slot_->buffer.is_sparse()) slot_->buffer = slot_->buffer.coalesce();
    tell({incoming, address(slot_->buffer), bytes_of(slot_->buffer)});
  }

  void tell(const SinkEvent& event) const {
    if (*slot_->watcher) (*slot_->watcher)(event);
  }

  // Summed in fp32: many small addends would be lost in a half precision buffer.
  void add_half(const at::Tensor& variable, at::Tensor& gradient) {
    if (slot_->buffer.defined() && !slot_->buffer.is_sparse() && !gradient.is_sparse()) {
      slot_->buffer.add_(gradient);
      return;
    }
    gradient = gradient.to(at::kFloat);
    compat::accumulate(variable, slot_->buffer, gradient, /*references=*/1);
  }

  std::shared_ptr<Slot> slot_;
};

struct GradientSinks::Entry {
  std::shared_ptr<Slot> slot;
  NodePtr sink;
  at::Tensor parameter;  // held where the leaf is a parameter; other leaves are not kept alive
  NodePtr previous;      // the accumulator that the parameter had
  bool installed = false;
  c10::TensorImpl* identity = nullptr;
};

GradientSinks::GradientSinks(const std::vector<NamedParameter>& parameters, bool nested,
                             bool installed)
    : watcher_(std::make_shared<Watcher>()), norms_(NormMeter::counter()), nested_(nested) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (const NamedParameter& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) continue;
    if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;  // tied weights
    Entry& entry = add(parameter.tensor);
    entry.parameter = parameter.tensor;
    entry.slot->norms = norms_;
    entry.slot->open = false;
    if (installed) install(entry, "parameter ", &parameter.name);
  }
  parameter_count_ = entries_.size();
}

void GradientSinks::install(Entry& entry, const char* which, const std::string* name) {
  NodePtr current = compat::accumulator_of(entry.parameter);
  const auto* other = dynamic_cast<const Sink*>(current.get());
  if (other != nullptr && !(nested_ && other->is_around())) {
    uninstall();
    throw StateError(std::string("another step is running on ") + which +
                     (name != nullptr ? "'" + *name + "'" : "") +
                     "; a model can take one VirtualBatch step, or one backward through what wrap "
                     "made of it, at a time; give each thread a model of its own");
  }
  entry.previous = std::move(current);
  compat::set_accumulator(entry.parameter, entry.sink);
  entry.installed = true;
  entry.slot->set_open(true);
}

GradientSinks::~GradientSinks() {
  uninstall();
  for (const auto& entry : entries_) {
    std::lock_guard<std::mutex> lock(entry->slot->mutex);
    entry->slot->open = false;
    entry->slot->buffer.reset();
  }
}

GradientSinks::Entry& GradientSinks::add(const at::Tensor& variable) {
  auto entry = std::make_unique<Entry>();
  entry->slot = std::make_shared<Slot>(variable);
  entry->slot->watcher = watcher_;
  entry->sink = compat::make_node<Sink>(variable, entry->slot);
  entry->identity = variable.unsafeGetTensorImpl();
  entries_.push_back(std::move(entry));
  return *entries_.back();
}

void GradientSinks::adopt(const at::Tensor& leaf, bool installed) {
  Entry& entry = add(leaf);
  entry.parameter = leaf;
  entry.slot->open = false;
  if (installed) install(entry, "a tensor that forward reads");
  parameter_count_ = entries_.size();
}

void GradientSinks::uninstall() {
  // No gradient may come from user code, between the passes of a wrapped model.
  for (const auto& entry : entries_) entry->slot->set_open(false);
  for (const auto& entry : entries_) {
    if (!entry->installed) continue;
    // Held no longer than it is out of its place: graphs that lead there tell who else does.
    compat::set_accumulator(entry->parameter, std::exchange(entry->previous, NodePtr()));
    entry->installed = false;
  }
}

void GradientSinks::install() {
  for (const auto& entry : entries_) {
    entry->slot->thread = std::this_thread::get_id();
    if (entry->parameter.defined() && !entry->installed) install(*entry, "one of the parameters");
    entry->slot->set_open(true);
  }
}

void GradientSinks::redirect_other_leaves(const std::vector<at::Tensor>& roots,
                                          const std::vector<at::Tensor>& except, bool once) {
  std::unordered_set<c10::TensorImpl*> left_alone;
  for (const at::Tensor& leaf : except) left_alone.insert(leaf.unsafeGetTensorImpl());
  walk_graph(roots, [&](Node& node) {
    if (once) add_products_of(node);
    for (Edge& edge : node.next_edges()) {
      // Accumulators end the graph. Asked first because casts are slow.
      if (!edge.function || edge.function->num_outputs() != 0) continue;
      auto* accumulator = dynamic_cast<AccumulateGrad*>(edge.function.get());
      if (accumulator == nullptr) continue;
      // Not held: the edge keeps the accumulator, and with it the leaf, until it is replaced.
      at::Tensor variable = accumulator->variable;
      for (const auto& [made, stands] : stand_ins_) {
        if (made.is_same(variable)) variable = stands;
      }
      c10::TensorImpl* identity = variable.unsafeGetTensorImpl();
      if (left_alone.contains(identity)) continue;
      Entry* entry = nullptr;
      for (const auto& known : entries_) {
        if (known->identity == identity && known->slot->lock().defined()) entry = known.get();
      }
      if (entry == nullptr) entry = &add(variable);
      // Not by set_next_edge, which refuses nodes that have a parent for the sake of topological
      // numbers: a sink's is 0, as the accumulator's was.
      edge = Edge(entry->sink, 0);
    }
  });
}

void GradientSinks::add_products_of(Node& node) {
  const WeightProduct product = WeightProduct::of(node);
  if (!product || product.end->num_outputs() != 0) return;
  const auto* found = dynamic_cast<const Sink*>(product.end);
  if (found == nullptr || !found->takes_products()) return;
  NodePtr sink = node.next_edge(product.edge).function;
  if (product.transposed) sink = sink->next_edge(0).function;
  product.give_factors([sink = std::move(sink)](const at::Tensor& left, const at::Tensor& right) {
    static_cast<Sink&>(*sink).add_product(left, right);
  });
}

void GradientSinks::release(const std::vector<at::Tensor>& roots) const {
  walk_graph(roots, [&](Node& node) {
    for (Edge& edge : node.next_edges()) {
      if (!edge.function || edge.function->num_outputs() != 0) continue;
      const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const auto& known) {
        return known->sink == edge.function;
      });
      if (entry == entries_.end()) continue;
      const at::Tensor variable = (*entry)->slot->lock();
      if (variable.defined()) edge = torch::autograd::impl::gradient_edge(variable);
    }
  });
}

void GradientSinks::let_stand(const at::Tensor& made, const at::Tensor& stands) {
  stand_ins_.emplace_back(made, stands);
}

void GradientSinks::forget_dead_leaves() {
  stand_ins_.clear();
  if (entries_.size() == parameter_count_) return;
  std::erase_if(entries_, [](const std::unique_ptr<Entry>& entry) {
    return !entry->parameter.defined() && !entry->slot->lock().defined();
  });
}

/// A root that gives each sum away to torch's accumulators. A sum that only the engine holds is
/// taken over as `.grad` without a copy.
class GradientSinks::HandOut : public Node {
 public:
  HandOut() : Node(torch::autograd::edge_list()) { add_input_metadata(no_gradient()); }

  void add(const at::Tensor& variable, at::Tensor sum) {
    add_next_edge(torch::autograd::impl::gradient_edge(variable));
    sums_.push_back(std::move(sum));
  }
  variable_list apply(variable_list&&) override { return std::move(sums_); }
  std::string name() const override { return "infinitybatch::HandOut"; }

 private:
  variable_list sums_;
};

namespace {

/// Whether handing out can run user code, or can fail half way for want of memory.
bool can_fail(const at::Tensor& variable, const NodePtr& accumulator, const at::Tensor& sum) {
  return !torch::autograd::impl::hooks(variable).empty() ||
         torch::autograd::impl::post_acc_grad_hooks(variable) != nullptr || sum.is_sparse() ||
         (accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty()));
}

/// `.grad` of one tensor as it was, so that a hook that throws cannot leave half a hand-out behind.
struct GradBackup {
  at::Tensor variable;
  at::Tensor grad;    // the tensor object that was there
  at::Tensor values;  // its values, where adding in place would lose them
};

/// What torch's accumulators do. Where nobody has a hook there is no need of an engine to call
/// them.
void accumulate_all(const std::vector<GradBackup>& into, std::vector<at::Tensor>& sums) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < sums.size(); ++i) {
    const at::Tensor& variable = into[i].variable;
    compat::accumulate(variable, variable.mutable_grad(), sums[i], /*references=*/1);
    sums[i].reset();
  }
}

}  // namespace

void GradientSinks::next_micro_batch() {
  if (norms_) norms_->next_micro_batch();
}

void GradientSinks::end_micro_batches() {
  if (!norms_ || norms_->ended()) return;
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < parameter_count_; ++i) sums.push_back(entries_[i]->slot->buffer);
  norms_->end(sums);
}

void GradientSinks::hand_out() {
  uninstall();
  end_micro_batches();
  if (norms_) NormMeter::publish(norms_);
  std::vector<GradBackup> backups;
  std::vector<at::Tensor> sums;
  bool back_up_values = false;
  bool engine = false;
  for (const auto& entry : entries_) {
    const at::Tensor variable = entry->slot->lock();
    if (!variable.defined() || !entry->slot->buffer.defined()) continue;
    backups.push_back({variable, variable.grad(), {}});
    const NodePtr accumulator = compat::accumulator_of(variable);
    const bool can_fail_here = can_fail(variable, accumulator, entry->slot->buffer);
    back_up_values = back_up_values || can_fail_here;
    engine = engine || can_fail_here || !variable.is_cpu();
    at::Tensor sum = std::move(entry->slot->buffer);
    if (sum.scalar_type() != variable.scalar_type()) sum = sum.to(variable.scalar_type());
    sums.push_back(std::move(sum));
  }
  if (sums.empty()) return;
  if (back_up_values) {
    for (GradBackup& backup : backups) {
      if (backup.grad.defined()) backup.values = backup.grad.clone();
    }
  }
  try {
    if (engine) {
      auto root = compat::make_node<HandOut>();
      for (size_t i = 0; i < sums.size(); ++i) root->add(backups[i].variable, std::move(sums[i]));
      run_root(root);
    } else {
      accumulate_all(backups, sums);
    }
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    const Unwatched unwatched;
    for (const GradBackup& backup : backups) {
      if (backup.values.defined()) backup.grad.copy_(backup.values);
      backup.variable.mutable_grad() = backup.grad;
    }
    throw;
  }
}

std::vector<at::Tensor> GradientSinks::take() {
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < parameter_count_; ++i) {
    at::Tensor sum = std::exchange(entries_[i]->slot->buffer, at::Tensor());
    const at::ScalarType type = entries_[i]->parameter.scalar_type();
    sums.push_back(sum.defined() && sum.scalar_type() != type ? sum.to(type) : std::move(sum));
  }
  return sums;
}

void GradientSinks::watch(Watcher watcher) {
  *watcher_ = std::move(watcher);
}

int64_t GradientSinks::bytes() const {
  int64_t total = 0;
  for (const auto& entry : entries_) total += bytes_of(entry->slot->buffer);
  return total;
}

}  // namespace infinitybatch::autograd
