#include "wrap_budget.hpp"
#include "wrap_cuts.hpp"
#include "wrap_seam.hpp"

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/autograd/gradient_sinks.hpp>
#include <infinitybatch/autograd/node_at_work.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/pinned_copies.hpp>
#include <infinitybatch/core/torch_compat.hpp>
#include <infinitybatch/core/transforms.hpp>
#include <infinitybatch/core/unwatched.hpp>
#include <infinitybatch/coupled/coupling_watch.hpp>
#include <infinitybatch/execute/execution_log.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/tape/draws.hpp>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Calls `run`, then `put_back`, whether `run` throws or not. No destructor does so: putting back
/// runs ops and Python, which has to be rid of its exception first, and may throw.
template <typename Run, typename PutBack>
auto run_and_put_back(const Run& run, const PutBack& put_back) {
  try {
    auto result = run();
    put_back();
    return result;
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    const Unwatched unwatched;
    put_back();
    throw;
  }
}

/// Runs backward with the parameters that required grad in forward, and puts the state back that
/// user code must not see changed: buffers, and which parameters require grad (freezing them after
/// forward does not matter natively).
template <typename Run>
auto with_state_put_back(const WrappedCall& call, const Run& run) {
  const BufferValues buffers(call.buffers);
  std::vector<std::pair<at::Tensor, bool>> turned;
  for (const auto& [tensor, flag] : call.requires_grad) {
    if (tensor.requires_grad() != flag) turned.emplace_back(tensor, !flag);
  }
  return run_and_put_back(
      [&] {
        for (const auto& [tensor, flag] : turned) tensor.set_requires_grad(!flag);
        return run();
      },
      [&] {
        buffers.restore();
        for (const auto& [tensor, flag] : turned) tensor.set_requires_grad(flag);
      });
}

/// Runs user code again, under the random numbers and the modes of forward.
template <typename Run>
auto as_in_forward(const WrappedCall& call, const WrappedCall::Part& part, const Run& run) {
  const tape::ModesGuard modes;
  const RngSnapshot random = RngSnapshot::capture(call.devices);
  const tape::GeneratorsGuard generators(part.tape);  // the user's own too
  return run_and_put_back(
      [&] {
        part.random.restore();
        tape::set_states(part.tape.initial);
        call.modes.apply();
        return run();
      },
      [&] { random.restore(); });
}

/// One backward pass over all micro-batches, last to first. Nothing leaves it before `gradients`.
class BackwardPass {
 public:
  /// \param kept graphs of forward; null without any
  BackwardPass(const WrappedCall& call, const std::vector<at::Tensor>& gradients, bool use_tapes,
               std::unique_ptr<WrappedCall::Kept> kept)
      : call_(call),
        seam_(call, gradients),
        use_tapes_(use_tapes),
        kept_(std::move(kept)),
        own_sinks_(kept_ ? nullptr
                         : std::make_unique<autograd::GradientSinks>(call.leaves, /*nested=*/true)),
        sinks_(kept_ ? *kept_->sinks : *own_sinks_) {
    sinks_.install();
  }
  ~BackwardPass() { sinks_.uninstall(); }
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  void run() {
    for (size_t i = call_.parts.size(); i-- > 0;) {
      if (call_.wrapped->options.interrupt) call_.wrapped->options.interrupt();
      const auto kept = kept_ ? kept_->graphs.find(i) : std::map<size_t, Graph>::iterator();
      if (kept_ && kept != kept_->graphs.end()) {
        ExecutionLog::note("wrap backward, kept", call_.parts[i].rows);
        Graph graph = std::move(kept->second);
        kept_->graphs.erase(kept);
        fetch(graph);
        differentiate(call_.parts[i], graph.inputs, std::move(graph.outputs));
      } else {
        run(call_.parts[i]);
      }
      memory::Limit::check();
    }
  }
  bool replayed() const noexcept { return replayed_; }
  /// Whether outputs differ from those of forward. Waits for the device.
  bool differs() const { return seam_.differs(); }

  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> sums = sinks_.take();
    sums.insert(sums.end(), seam_.of_inputs().begin(), seam_.of_inputs().end());
    return sums;
  }

 private:
  using Graph = WrappedCall::Kept::Graph;

  void run(const WrappedCall::Part& part);
  void fetch(Graph& graph);
  void differentiate(const WrappedCall::Part& part, const Batch& micro, Batch outputs);
  Batch outputs_of(const WrappedCall::Part& part, const Batch& micro);

  const WrappedCall& call_;
  WrapSeam seam_;
  const bool use_tapes_;
  const std::unique_ptr<WrappedCall::Kept> kept_;
  const std::unique_ptr<autograd::GradientSinks> own_sinks_;
  autograd::GradientSinks& sinks_;
  bool replayed_ = false;
};

void BackwardPass::run(const WrappedCall::Part& part) {
  ExecutionLog::note("wrap backward", part.rows);
  const Batch micro = call_.micro_batch(part.rows);
  part.buffers->restore();
  Batch outputs = outputs_of(part, micro);
  seam_.compare(part.rows, part.numbers, outputs);
  differentiate(part, micro, std::move(outputs));
}

/// What it keeps is there again, and what the next one keeps begins to come.
void BackwardPass::fetch(Graph& graph) {
  if (!graph.memory) return;
  graph.memory->fetch(/*ahead=*/false);
  graph.memory.reset();
  if (!call_.overlaps || kept_->graphs.empty()) return;
  std::optional<GraphMemory>& next = kept_->graphs.rbegin()->second.memory;
  if (next) next->fetch(/*ahead=*/true);
}

void BackwardPass::differentiate(const WrappedCall::Part& part, const Batch& micro, Batch outputs) {
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> seeds;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& output = outputs.leaves()[i].tensor;
    if (!output.defined() || !output.requires_grad()) continue;
    at::Tensor seed = seam_.gradient(part.rows, i, output);
    if (!seed.defined()) continue;
    roots.push_back(output);
    seeds.push_back(std::move(seed));
  }
  // The graph keeps what it needs of them.
  outputs = Batch();
  if (!roots.empty()) {
    sinks_.redirect_other_leaves(roots, micro.tensors());
    autograd::run_backward_of_part(roots, seeds);
    roots.clear();
    seam_.collect(part.rows, micro);
  }
  at::autocast::clear_cache();
  sinks_.forget_dead_leaves();
  if (sinks_.has_other_leaves()) {
    throw Unsupported(
        "forward keeps a leaf that requires grad and that it makes anew each time, so its gradient "
        "would be lost; make it once, outside of forward");
  }
}

Batch BackwardPass::outputs_of(const WrappedCall::Part& part, const Batch& micro) {
  if (use_tapes_ && !part.tape.opaque) {
    replayed_ = true;
    return tape::replay(part.tape, micro);
  }
  for (const Version& version : call_.parameter_versions) version.check();
  const auto forward = [&] {
    const auto run = [&] { return call_.wrapped->model.forward(micro); };
    return call_.runs ? call_.runs->uncounted(run) : run();
  };
  return as_in_forward(call_, part, [&] {
    if (!call_.renormed) return forward();
    // Rows that forward has scaled are not scaled again.
    coupled::CouplingWatch watch(call_.renormed);
    const coupled::CouplingWatch::Scope watching(watch);
    Batch outputs = forward();
    watch.rethrow();
    return outputs;
  });
}

std::vector<at::Tensor> run_once(const WrappedCall& call, const std::vector<at::Tensor>& gradients,
                                 bool use_tapes, std::unique_ptr<WrappedCall::Kept> kept,
                                 bool& differs) {
  BackwardPass pass(call, gradients, use_tapes, std::move(kept));
  pass.run();
  differs = pass.differs();
  if (differs && !pass.replayed()) {
    throw Unsupported(
        "forward gave other outputs when it ran again on the same rows under the same random "
        "state, so its gradient would not belong to the outputs. It depends on a kernel that is "
        "not deterministic, on code that torch.compile compiled again in between "
        "(torch.compile(model, dynamic=True)), or on state other than parameters, buffers and "
        "torch's, NumPy's or Python's random numbers (train() or eval() called before backward, "
        "say)");
  }
  return differs ? std::vector<at::Tensor>() : pass.gradients();
}

/// Backward of a whole wrapped forward. Runs the engine again inside: holds no lock meanwhile.
class WrapNode : public Node {
 public:
  explicit WrapNode(std::shared_ptr<WrappedCall> call) : call_(std::move(call)) {}
  ~WrapNode() override { left_out_->node = nullptr; }
  WrapNode(const WrapNode&) = delete;
  WrapNode& operator=(const WrapNode&) = delete;

  variable_list apply(variable_list&& gradients) override {
    const std::shared_ptr<WrappedCall> call = call_;
    TORCH_CHECK(call != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    const WrapOptions& options = call->wrapped->options;
    const PinnedCopies copies;
    const autograd::NodeAtWork at_work(*this);
    try {
      variable_list sums;
      std::exception_ptr error;
      *call->at_work = true;
      if (call->going_back) *call->going_back = true;
      try {
        check_left_behind();
        sums = backward(*call, gradients);
      } catch (...) {
        error = std::current_exception();
        keep_foreign_exception(error);
      }
      *call->at_work = false;
      if (call->going_back) {
        *call->going_back = false;
        call->wrapped->left_unread = true;
      }
      if (options.agree) options.agree(error);
      if (error) std::rethrow_exception(error);
      check_left_out(sums);
      leave_out_unreached(sums);
      return sums;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      keep_foreign_exception(error);
      if (options.on_backward_error) options.on_backward_error(error);
      throw;
    }
  }

  /// The engine calls it after a backward without `retain_graph`.
  void release_variables() override { call_.reset(); }

  std::string name() const override { return "infinitybatch::Wrap"; }

 private:
  /// Other nodes of a forward whose outputs are in this graph belong to tensors that it left
  /// behind. The engine would come to them last, with gradients of parameters handed out.
  static void check_left_behind() {
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (nodes == nullptr) return;
    std::vector<std::shared_ptr<WrappedCall>> calls;
    for (Node* node : *nodes) {
      if (typeid(*node) != typeid(WrapNode)) continue;
      const std::shared_ptr<WrappedCall>& call = static_cast<WrapNode*>(node)->call_;
      if (call != nullptr) calls.push_back(call);
    }
    for (const std::shared_ptr<WrappedCall>& call : calls) {
      // The graph of the whole batch may be anybody's, unless it is kept for the outputs.
      const bool whole = !call->cuts && call->parts.size() == 1;
      if (whole && call->kept_count() == 0) continue;
      const bool left = std::any_of(nodes->begin(), nodes->end(), [&](const Node* node) {
        return call->made(*node) || has_no_way_back(*node);
      });
      if (!left) continue;
      if (whole) call->wrapped->left_read = true;
      refuse_left(whole);
    }
  }

  /// Edges that are out of their place for one backward.
  struct LeftOut {
    explicit LeftOut(WrapNode& node) : node(&node) {}
    void put_back() {
      if (node == nullptr) return;
      for (auto& [index, edge] : edges) node->next_edges()[index] = std::move(edge);
      edges.clear();
    }
    WrapNode* node;  // null when it is gone
    std::vector<std::pair<size_t, torch::autograd::Edge>> edges;
  };

  /// Hooks of leaves that get no gradient would be called with None. Natively no node leads there,
  /// and they do not run. With `retain_graph` another backward may reach them.
  void leave_out_unreached(const variable_list& sums) {
    for (size_t i = 0; i < sums.size(); ++i) {
      torch::autograd::Edge& edge = next_edges()[i];
      if (sums[i].defined() || !edge.is_valid()) continue;
      // Where another node leads there it is that one's gradient, which waits for this node.
      if (edge.function->tensor_pre_hooks().empty() || edge.function.use_count() > 1) continue;
      left_out_->edges.emplace_back(i, std::exchange(edge, torch::autograd::Edge()));
    }
    if (left_out_->edges.empty() || !torch::autograd::get_current_graph_task_keep_graph()) return;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [left_out = left_out_] { left_out->put_back(); });
  }

  /// The engine calls back only where a backward succeeds.
  void check_left_out(const variable_list& sums) const {
    for (const auto& [index, edge] : left_out_->edges) {
      if (!sums[index].defined()) continue;
      throw StateError(
          "an earlier backward through this output has failed, and this one reaches parameters "
          "that "
          "it did not; call the model once more, and backward from its new output");
    }
  }

  std::shared_ptr<WrappedCall> call_;
  // Held, too, because the engine knows them by address.
  std::shared_ptr<LeftOut> left_out_ = std::make_shared<LeftOut>(*this);
};

/// Tells the call what was copied while it lives.
class Copying {
 public:
  explicit Copying(WrappedCall& call) : call_(call) {
    if (call.store) before_ = call.store->statistics();
  }
  ~Copying() {
    if (call_.store) call_.add_offloaded(OffloadedMeanwhile(before_, call_.store->statistics()));
  }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;

 private:
  WrappedCall& call_;
  offload::StoreStatistics before_;
};

std::vector<at::Tensor> run(WrappedCall& call, const std::vector<at::Tensor>& gradients) {
  const OneThread alone_in_it(*call.wrapped);
  if (call.cuts) {
    return call.cuts->backward(gradients, torch::autograd::get_current_graph_task_keep_graph());
  }
  bool differs = false;
  const StoreUse alone(*call.wrapped, call.store.get());
  const Copying copying(call);
  std::unique_ptr<WrappedCall::Kept> kept = call.take_kept();
  if (call.wrapped->use_tapes) {
    std::vector<at::Tensor> sums =
        run_once(call, gradients, /*use_tapes=*/true, std::move(kept), differs);
    if (!differs) return sums;
    call.wrapped->use_tapes = false;
  }
  return run_once(call, gradients, /*use_tapes=*/false, std::move(kept), differs);
}

}  // namespace

std::vector<at::Tensor> backward(WrappedCall& call, const std::vector<at::Tensor>& gradients) {
  if (at::GradMode::is_enabled()) {
    throw Unsupported(
        "create_graph=True needs a graph of the gradients, which a wrapped model does not give; "
        "run this batch through ib.unwrap(model), or give a micro_batch_size as large as the "
        "batch");
  }
  refuse_batched(gradients);
  for (const Version& version : call.input_versions) version.check();
  return with_state_put_back(call, [&] {
    if (!call.budget) return run(call, gradients);
    return backward_under_budget(call, [&] { return run(call, gradients); });
  });
}

void attach_node(const std::shared_ptr<WrappedCall>& call, const Batch& inputs,
                 const std::vector<bool>& wanted, Batch& outputs) {
  torch::autograd::edge_list edges;
  for (const NamedParameter& leaf : call->leaves) {
    edges.push_back(torch::autograd::impl::gradient_edge(leaf.tensor));
  }
  for (const size_t index : call->wanted_inputs) {
    edges.push_back(torch::autograd::impl::gradient_edge(inputs.leaves()[index].tensor));
  }
  const auto node = compat::make_node<WrapNode>(call);
  node->set_next_edges(std::move(edges));
  call->gradient_of_output.assign(outputs.leaves().size(), -1);
  int number = 0;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& output = outputs.leaves()[i].tensor;
    // Alone: the node must not hold the output, which holds the node.
    at::Tensor& kept = call->outputs.whole.leaves()[i].tensor;
    if (output.defined()) kept = output.detach();
    call->output_versions.push_back(output.defined() ? Version::of("an output", kept) : Version());
    if (i >= wanted.size() || !wanted[i]) continue;
    torch::autograd::create_gradient_edge(outputs.leaves()[i].tensor, node);
    call->gradient_of_output[i] = number++;
  }
}

}  // namespace infinitybatch
