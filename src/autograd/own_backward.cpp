#include "autograd/own_backward.hpp"

#include "autograd/engine.hpp"

#include <cctype>
#include <string>

namespace infinitybatch::autograd {
namespace {

/// By their names: torch numbers those that it generates ("AddmmBackward0").
bool is_own(const std::string& name) {
  if (name.empty() || name.find("infinitybatch") != std::string::npos) return false;
  if (name.find("CppNode") != std::string::npos) return true;
  if (name.starts_with("torch::") || name.starts_with("CompiledFunction")) return false;
  return std::isdigit(static_cast<unsigned char>(name.back())) == 0;
}

}  // namespace

bool has_own_backward(const std::vector<at::Tensor>& roots) {
  bool found = false;
  walk_graph(roots, [&](torch::autograd::Node& node) {
    if (found || node.num_outputs() == 0) return;  // a leaf's
    found = !node.pre_hooks().empty() || !node.post_hooks().empty() ||
            !node.tensor_pre_hooks().empty() || is_own(node.name());
  });
  return found;
}

bool has_hooks(const at::Tensor& leaf) {
  return !torch::autograd::impl::hooks(leaf).empty();
}

}  // namespace infinitybatch::autograd
