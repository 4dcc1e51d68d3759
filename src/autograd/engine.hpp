#pragma once

#include "core/torch_compat.hpp"

#include <functional>
#include <vector>

namespace infinitybatch::autograd {

/// Runs the graph behind `roots` backward and, but for `keep`, frees it. Gradients go wherever the
/// graph's leaves send them. Autocast is off meanwhile, as it is when `backward()` is called
/// outside the autocast region. After a failure the engine's queue of this thread holds nothing of
/// the failed run.
/// \param gradients one for each root, same shape and device
void run_backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                  bool keep = false);

/// The same for the graph of a part of the batch: other parts run backward, too.
/// \throws Unsupported where they share a graph that only one of them can use
void run_backward_of_part(const std::vector<at::Tensor>& roots,
                          const std::vector<at::Tensor>& gradients);

/// The gradients of `root`, one number, at `edges`: they are caught there and go no further. But
/// for `keep` the graph is freed. Autocast and failures as in `run_backward`.
/// \return one for each edge; undefined where `root` does not depend on it
std::vector<at::Tensor> gradients_at(const at::Tensor& root,
                                     const torch::autograd::edge_list& edges, bool keep = true);

/// A node is about to throw, in a backward pass of this thread that somebody else runs.
void note_failed_pass() noexcept;
/// What was ready to run when such a pass failed stays in the engine's queue of this thread, with
/// all that it holds, until the next pass. Lets go of it, where there was one.
void forget_failed_pass();

/// Visits each node of the graph behind `roots` once, nearer ones first. `visit` may replace edges.
void walk_graph(const std::vector<at::Tensor>& roots,
                const std::function<void(torch::autograd::Node&)>& visit);

/// Stands for the gradient of a root that needs none: the engine wants a defined tensor. It has no
/// elements, so it can be made when memory has run out.
at::Tensor no_gradient();

/// Runs `node`, whose input is `no_gradient()`, as the only root.
void run_root(const compat::NodePtr& node);

}  // namespace infinitybatch::autograd
