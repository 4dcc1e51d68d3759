#pragma once

#include "core/torch_compat.hpp"

#include <ATen/core/TensorBody.h>

#include <vector>

// A loss whose gradients are computed together with it, tile by tile, so that nothing of a tile has
// to be kept for backward: one graph node holds the gradients and scales them.
namespace infinitybatch::losses {

/// Whether autograd would ask for the gradient of `tensor` here.
bool wants_gradient(const at::Tensor& tensor);

/// \param name      of the loss, for messages and graphs
/// \param value     0-dimensional, without graph
/// \param inputs    what the value was computed from
/// \param gradients the value's gradient for each input, of its shape; undefined where none is
///                  wanted. They belong to nobody else: backward scales them in place, unless its
///                  graph is kept.
/// \param constant  0-dimensional, where it is true the value depends on nothing: gradients are 0,
///                  even if what comes from above is infinite (a mean over no target). Undefined:
///                  never
/// \return `value` with a graph; itself where no gradient is defined
/// Backward throws Unsupported under create_graph, and StateError where it has been there already.
at::Tensor with_gradients(const char* name, const at::Tensor& value,
                          const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> gradients,
                          const at::Tensor& constant = {});

/// The same where inputs are known by where their gradients go.
at::Tensor with_gradients(const char* name, const at::Tensor& value,
                          torch::autograd::edge_list edges, std::vector<at::Tensor> gradients,
                          const at::Tensor& constant = {});

}  // namespace infinitybatch::losses
