#pragma once

#include <ATen/core/TensorBody.h>

#include <string>
#include <vector>

namespace infinitybatch {

/// Transforms of torch.func and forward-mode AD see each op that runs under them; what is computed
/// micro-batch by micro-batch, and joined in a graph node of its own, they would not see.
///
/// \throws Unsupported naming the transform where one is at work in this thread
void refuse_transforms();

/// Whether `tensor` carries a tangent of forward-mode AD.
bool has_tangent(const at::Tensor& tensor);

/// \throws Unsupported where `tensor` carries a tangent of forward-mode AD
void refuse_tangent(const std::string& name, const at::Tensor& tensor);

/// \throws Unsupported where one of the gradients that backward is given stands for many, by vmap
/// (`is_grads_batched`, `jacobian(vectorize=True)`)
void refuse_batched(const std::vector<at::Tensor>& gradients);

}  // namespace infinitybatch
