#include "autograd/node_at_work.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::autograd {
namespace {

const torch::autograd::Node*& innermost() noexcept {
  static thread_local const torch::autograd::Node* node = nullptr;
  return node;
}

}  // namespace

NodeAtWork::NodeAtWork(const torch::autograd::Node& node) noexcept
    : before_(std::exchange(innermost(), &node)) {}

NodeAtWork::~NodeAtWork() {
  innermost() = before_;
}

bool NodeAtWork::leads_to(const torch::autograd::Node& node) noexcept {
  if (innermost() == nullptr) return false;
  const auto& edges = innermost()->next_edges();
  return std::any_of(edges.begin(), edges.end(),
                     [&](const auto& edge) { return edge.function.get() == &node; });
}

}  // namespace infinitybatch::autograd
