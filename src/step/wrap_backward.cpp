#include "autograd/engine.hpp"
#include "autograd/gradient_sinks.hpp"
#include "autograd/node_at_work.hpp"
#include "core/foreign_exception.hpp"
#include "core/in_step.hpp"
#include "core/pinned_copies.hpp"
#include "core/torch_compat.hpp"
#include "core/transforms.hpp"
#include "core/unwatched.hpp"
#include "step/wrap_budget.hpp"
#include "step/wrap_run.hpp"

#include <infinitybatch/core/errors.hpp>

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

/// Runs backward with the parameters that required grad in forward, and puts the state back that
/// user code must not see changed: buffers, and which parameters require grad (freezing them after
/// forward does not matter natively).
template <typename Run>
auto with_state_put_back(const WrappedCall& call, const Run& run) {
  BufferValues buffers(call.buffers);
  buffers.add_parameters_of(call.run->found());
  std::vector<std::pair<at::Tensor, bool>> turned;
  for (const auto& [tensor, flag] : call.requires_grad) {
    if (tensor.requires_grad() != flag) turned.emplace_back(tensor, !flag);
  }
  // No destructor does so: it runs ops and Python, which has to be rid of its exception first.
  const auto put_back = [&] {
    buffers.restore();
    for (const auto& [tensor, flag] : turned) tensor.set_requires_grad(flag);
  };
  try {
    for (const auto& [tensor, flag] : turned) tensor.set_requires_grad(!flag);
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
    const WrapOptions& own = call->wrapped->own;
    const PinnedCopies copies;
    const autograd::NodeAtWork at_work(*this);
    const InStep running;
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
      if (own.agree) own.agree(error);
      if (error) std::rethrow_exception(error);
      call->wrapped->went_back = true;
      check_left_out(sums);
      leave_out_unreached(sums);
      return sums;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      keep_foreign_exception(error);
      autograd::note_failed_pass();
      if (own.on_backward_error) own.on_backward_error(error);
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
      const bool whole = !call->run->cut() && call->run->part_count() == 1;
      const bool left = std::any_of(nodes->begin(), nodes->end(), [&](const Node* node) {
        return call->made(*node) || has_no_way_back(*node);
      });
      if (!left) continue;
      if (whole) call->wrapped->left_read = true;
      if (whole && call->run->kept_graphs() == 0) continue;
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

std::vector<at::Tensor> run(WrappedCall& call, const std::vector<at::Tensor>& gradients) {
  const OneThread alone(*call.wrapped);
  return call.run->backward(gradients, torch::autograd::get_current_graph_task_keep_graph());
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
  for (size_t i = 0; call.trimming && i < call.gradient_of_output.size(); ++i) {
    const int number = call.gradient_of_output[i];
    if (number < 0) continue;
    call.trimming->check_gradient(i, call.outputs.whole.leaves()[i].batch_dim,
                                  gradients[static_cast<size_t>(number)]);
  }
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
