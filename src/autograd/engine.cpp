#include "autograd/engine.hpp"

#include "core/foreign_exception.hpp"
#include "core/unwatched.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::autograd {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Autocast for every device type is off while this lives.
class AutocastOff {
 public:
  AutocastOff() {
    for (const at::DeviceType type : {at::kCPU, at::kCUDA, at::kXPU, at::kMPS, at::kPrivateUse1}) {
      if (at::autocast::is_autocast_enabled(type)) {
        at::autocast::set_autocast_enabled(type, false);
        enabled_.push_back(type);
      }
    }
  }
  ~AutocastOff() {
    for (const at::DeviceType type : enabled_) at::autocast::set_autocast_enabled(type, true);
  }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;

 private:
  std::vector<at::DeviceType> enabled_;
};

/// A node that does nothing. With the lowest priority of all it runs last, after whatever a failed
/// run left in this thread's queue, which is dropped on the way: without it those tasks would hold
/// their buffers and their graph until the next backward.
struct DrainNode : Node {
  DrainNode() : Node(/*sequence_nr=*/0) { add_input_metadata(no_gradient()); }
  variable_list apply(variable_list&&) override { return {}; }
};

void execute(const edge_list& roots, const variable_list& gradients, bool keep = false) {
  torch::autograd::Engine::get_default_engine().execute(
      roots, gradients, /*keep_graph=*/keep, /*create_graph=*/false, /*accumulate_grad=*/true);
}

void drain() {
  const Unwatched unwatched;
  execute({Edge(compat::make_node<DrainNode>(), 0)}, {no_gradient()});
}

/// Whether a node of ours has failed in a backward pass of this thread that somebody else runs.
thread_local bool pass_failed = false;

template <typename Run>
auto run_or_drain(const Run& run) {
  const AutocastOff autocast_off;
  try {
    return run();
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    drain();
    throw;
  }
}

void execute_or_drain(const edge_list& roots, const variable_list& gradients, bool keep = false) {
  run_or_drain([&] { execute(roots, gradients, keep); });
}

/// Nodes that were met. Most graphs of a micro-batch's loss are small enough to be searched
/// through.
class NodeSet {
 public:
  /// False where it was there.
  bool insert(Node* node) {
    if (!many_.empty()) return many_.insert(node).second;
    if (std::find(few_.begin(), few_.end(), node) != few_.end()) return false;
    few_.push_back(node);
    if (few_.size() > kFew) many_.insert(few_.begin(), few_.end());
    return true;
  }

 private:
  static constexpr size_t kFew = 32;
  c10::SmallVector<Node*, kFew + 1> few_;
  ska::flat_hash_set<Node*> many_;
};

}  // namespace

at::Tensor no_gradient() {
  return at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
}

void run_backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                  bool keep) {
  edge_list edges;
  edges.reserve(roots.size());
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  execute_or_drain(edges, gradients, keep);
}

void run_backward_of_part(const std::vector<at::Tensor>& roots,
                          const std::vector<at::Tensor>& gradients) {
  try {
    run_backward(roots, gradients);
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.find("Trying to backward through the graph a second time") == std::string::npos) throw;
    throw Unsupported(
        "backward came to a graph that an earlier backward has used up: forward, or the loss, "
        "reads a tensor that was computed before the step with a graph, which micro-batches (and "
        "measuring them) would go through more than once; pass it as an input (shared, if every "
        "sample needs it), or compute it inside forward");
  }
}

std::vector<at::Tensor> gradients_at(const at::Tensor& root, const edge_list& edges, bool keep) {
  return run_or_drain([&] {
    return torch::autograd::Engine::get_default_engine().execute(
        {torch::autograd::impl::gradient_edge(root)}, {at::ones_like(root.detach())},
        /*keep_graph=*/keep, /*create_graph=*/false, /*accumulate_grad=*/false, edges);
  });
}

void note_failed_pass() noexcept {
  pass_failed = true;
}

void forget_failed_pass() {
  if (std::exchange(pass_failed, false)) drain();
}

void walk_graph(const std::vector<at::Tensor>& roots, const std::function<void(Node&)>& visit) {
  NodeSet seen;
  c10::SmallVector<Node*, 32> open;
  const auto reach = [&](Node* node) {
    if (node != nullptr && seen.insert(node)) open.push_back(node);
  };
  for (const at::Tensor& root : roots) reach(root.grad_fn().get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    visit(*node);
    for (const Edge& edge : node->next_edges()) reach(edge.function.get());
  }
}

void run_root(const compat::NodePtr& node) {
  execute_or_drain({Edge(node, 0)}, {no_gradient()});
}

}  // namespace infinitybatch::autograd
