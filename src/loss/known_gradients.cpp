#include "loss/known_gradients.hpp"

#include "core/torch_compat.hpp"
#include "loss/backward_errors.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {
std::atomic<BackwardErrorHandler> handler{nullptr};
}

void register_backward_error_handler(BackwardErrorHandler to_call) {
  handler = to_call;
}

namespace losses {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class KnownGradients : public Node {
 public:
  KnownGradients(const char* name, std::vector<at::Tensor> gradients, at::Tensor constant)
      : name_(name), gradients_(std::move(gradients)), constant_(std::move(constant)) {}

  variable_list apply(variable_list&& upstream) override {
    try {
      return scaled(upstream.at(0));
    } catch (const Error&) {
      if (const BackwardErrorHandler handle = handler) handle(std::current_exception());
      throw;
    }
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    gradients_.clear();
    released_ = true;
  }

  std::string name() const override { return std::string("infinitybatch::losses::") + name_; }

 private:
  variable_list scaled(const at::Tensor& upstream) {
    if (c10::GradMode::is_enabled()) {
      throw Unsupported(std::string(name_) +
                        " computes its gradients together with its value, so that they have no "
                        "graph of their own: backward with create_graph=True is not possible; use "
                        "the plain formula on a smaller batch");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (released_) {
      throw StateError(std::string("backward through ") + name_ +
                       " a second time, after its gradients were handed out; pass "
                       "retain_graph=True the first time");
    }
    variable_list result(gradients_.size());
    if (!upstream.defined()) return result;
    const at::Tensor factor = constant_.defined() ? upstream.masked_fill(constant_, 0) : upstream;
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    for (size_t i = 0; i < gradients_.size(); ++i) {
      if (!gradients_[i].defined() || !task_should_compute_output(i)) continue;
      result[i] = keep ? gradients_[i].mul(factor) : std::exchange(gradients_[i], {}).mul_(factor);
    }
    return result;
  }

  const char* const name_;
  std::mutex mutex_;  // two threads may go backward through one graph
  std::vector<at::Tensor> gradients_;
  const at::Tensor constant_;
  bool released_ = false;
};

}  // namespace

bool wants_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && c10::GradMode::is_enabled();
}

at::Tensor with_gradients(const char* name, const at::Tensor& value,
                          const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> gradients,
                          const at::Tensor& constant) {
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < inputs.size(); ++i) {
    edges.push_back(gradients[i].defined() ? torch::autograd::impl::gradient_edge(inputs[i])
                                           : torch::autograd::Edge());
  }
  return with_gradients(name, value, std::move(edges), std::move(gradients), constant);
}

at::Tensor with_gradients(const char* name, const at::Tensor& value,
                          torch::autograd::edge_list edges, std::vector<at::Tensor> gradients,
                          const at::Tensor& constant) {
  bool any = false;
  for (const at::Tensor& gradient : gradients) any = any || gradient.defined();
  if (!any) return value;
  auto node = compat::make_node<KnownGradients>(name, std::move(gradients), constant);
  node->set_next_edges(std::move(edges));
  at::Tensor result = value.detach();
  torch::autograd::create_gradient_edge(result, std::move(node));
  return result;
}

}  // namespace losses
}  // namespace infinitybatch
