#pragma once

#include <torch/csrc/autograd/function.h>

namespace infinitybatch::autograd {

/// While it lives, `nested` sinks of this thread may stand inside those that get the gradients of
/// `node`: on an accelerator a node runs in another thread than the step around it.
class NodeAtWork {
 public:
  explicit NodeAtWork(const torch::autograd::Node& node) noexcept;
  ~NodeAtWork();
  NodeAtWork(const NodeAtWork&) = delete;
  NodeAtWork& operator=(const NodeAtWork&) = delete;

  /// Whether the innermost of this thread gives gradients to `node`.
  static bool leads_to(const torch::autograd::Node& node) noexcept;

 private:
  const torch::autograd::Node* before_;
};

}  // namespace infinitybatch::autograd
