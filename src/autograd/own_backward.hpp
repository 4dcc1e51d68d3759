#pragma once

#include <ATen/core/TensorBody.h>

#include <vector>

namespace infinitybatch::autograd {

/// Whether going back through the graph of these runs code of the user's: an `autograd.Function`, a
/// hook on a tensor or a module. Hooks on leaves see sums and do not count; neither do regions that
/// torch compiled.
bool has_own_backward(const std::vector<at::Tensor>& roots);

/// Whether somebody hangs on the gradient of this leaf.
bool has_hooks(const at::Tensor& leaf);

}  // namespace infinitybatch::autograd
