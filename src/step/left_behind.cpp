#include "step/left_behind.hpp"

#include "autograd/engine.hpp"
#include "core/engine_error.hpp"
#include "core/torch_compat.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <exception>
#include <typeinfo>

namespace infinitybatch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

/// Where graphs end that were dropped: whoever comes here keeps one micro-batch's tensor.
class LeftNode final : public Node {
 public:
  LeftNode() : Node(/*sequence_nr=*/UINT64_MAX) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    refuse_left_in_engine(/*whole_batch=*/false);
  }
  std::string name() const override { return "infinitybatch::LeftBehind"; }
};

}  // namespace

NodeRange NodeRange::from_here() {
  const uint64_t next = at::sequence_number::peek();
  return {at::RecordFunction::currentThreadId(), next, next};
}

void NodeRange::end_here() {
  end = at::sequence_number::peek();
}

void end_graphs(const std::vector<at::Tensor>& roots) {
  const auto end = compat::make_node<LeftNode>();
  autograd::walk_graph(roots, [&](Node& node) {
    for (torch::autograd::Edge& edge : node.next_edges()) {
      if (!edge.function || edge.function->num_outputs() != 0) continue;
      const auto* accumulator = dynamic_cast<AccumulateGrad*>(edge.function.get());
      if (accumulator == nullptr) continue;
      const uint32_t number = end->add_input_metadata(accumulator->variable);
      edge = torch::autograd::Edge(end, number);
    }
  });
}

at::Tensor without_way_back(const at::Tensor& values) {
  at::Tensor result = values.detach();
  torch::autograd::create_gradient_edge(result, compat::make_node<LeftNode>());
  return result;
}

bool has_no_way_back(const Node& node) {
  return typeid(node) == typeid(LeftNode);
}

void refuse_left(bool whole_batch) {
  if (whole_batch) {
    throw StateError(
        "the loss reads a tensor that forward of the wrapped model left behind (in an attribute, a "
        "hook or a closure), and that no loss read before: its graph is kept for the outputs. From "
        "the next call on it can be read: run this step once more");
  }
  throw Unsupported(
      "the loss goes back through a tensor that forward of the wrapped model left behind (in an "
      "attribute, a hook or a closure) and that is no output: its graph was that of one "
      "micro-batch, where the loss of the whole batch needs those of all. Return it as an output, "
      "with a row for each sample; detach it if nobody differentiates it; or give a "
      "micro_batch_size as large as the batch, without which a layer that sees the whole batch "
      "(BatchNorm) runs in pieces whatever the budget");
}

void refuse_left_in_engine(bool whole_batch) {
  try {
    refuse_left(whole_batch);
  } catch (...) {
    throw_through_engine(std::current_exception());
  }
}

void refuse_left_of_input_in_engine() {
  throw_through_engine(std::make_exception_ptr(Unsupported(
      "the loss reads a tensor that forward of the wrapped model left behind (in an attribute, a "
      "hook or a closure), and that depends on an input which requires grad: the input's gradient "
      "would lack that part. Return it as an output (reduce= says what becomes of one number)")));
}

}  // namespace infinitybatch
