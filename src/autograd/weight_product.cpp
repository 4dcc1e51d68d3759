#include "autograd/weight_product.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <memory>
#include <typeinfo>
#include <utility>

namespace infinitybatch::autograd {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::generated::AddmmBackward0;
using torch::autograd::generated::MmBackward0;
using torch::autograd::generated::TBackward0;

constexpr uint32_t kAddmmWeight = 2;  // of bias, rows, weight
constexpr uint32_t kMmWeight = 1;     // of rows, weight

SavedVariable& rows_of(Node& node) {
  if (typeid(node) == typeid(AddmmBackward0)) return static_cast<AddmmBackward0&>(node).mat1_;
  return static_cast<MmBackward0&>(node).self_;
}

bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

/// Runs before its node does.
class GiveFactors : public torch::autograd::FunctionPreHook {
 public:
  GiveFactors(const WeightProduct& product,
              std::function<void(const at::Tensor&, const at::Tensor&)> take)
      : product_(product), take_(std::move(take)) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (gradient.defined()) {
      SavedVariable& saved = rows_of(*product_.node);
      const at::Tensor rows = saved.unpack();
      // Whoever packed them unpacks them once, as ever.
      if (saved.has_hooks()) saved = SavedVariable(rows, /*is_output=*/false);
      product_.transposed ? take_(gradient.t(), rows) : take_(rows.t(), gradient);
    }
    return gradients;
  }

 private:
  WeightProduct product_;  // of the node that owns this hook
  std::function<void(const at::Tensor&, const at::Tensor&)> take_;
};

}  // namespace

WeightProduct WeightProduct::of(Node& node) {
  WeightProduct product;
  // Types first: casts are slow, and every node of every graph comes here.
  if (typeid(node) == typeid(AddmmBackward0)) {
    if (!static_cast<AddmmBackward0&>(node).alpha.equal(1)) return {};
    product.edge = kAddmmWeight;
  } else if (typeid(node) == typeid(MmBackward0)) {
    product.edge = kMmWeight;
  } else {
    return {};
  }
  Node* next = node.next_edge(product.edge).function.get();
  // Other hooks run before ours does, and see what it sees.
  const bool sees_gradient = !node.post_hooks().empty();
  if (next == nullptr || sees_gradient) return {};
  if (typeid(*next) == typeid(TBackward0)) {
    if (is_watched(*next)) return {};
    product.transposed = true;
    next = next->next_edge(0).function.get();
    if (next == nullptr) return {};
  }
  product.end = next;
  product.node = &node;
  return product;
}

void WeightProduct::give_factors(
    std::function<void(const at::Tensor&, const at::Tensor&)> take) const {
  node->next_edges()[edge] = Edge();
  node->add_pre_hook(std::make_unique<GiveFactors>(*this, std::move(take)));
}

}  // namespace infinitybatch::autograd
