#include "autograd/engine.hpp"
#include "loss/arguments.hpp"
#include "loss/embeddings.hpp"
#include "loss/known_gradients.hpp"
#include "loss/one_number.hpp"
#include "loss/tiles.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/contrastive.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace infinitybatch::losses {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr const char* kPairwise = "pairwise";
constexpr const char* kFunction = "the function of losses.pairwise";

/// Evaluates one tile after the other, each forward and, where gradients are wanted, backward.
class Tiles {
 public:
  Tiles(const at::Tensor& a, const at::Tensor& b)
      : a_(a.detach()), b_(b.detach()), wants_a_(wants_gradient(a)), wants_b_(wants_gradient(b)) {
    total_ = at::zeros({}, a_.options().dtype(accumulation_type(a_.device())));
    if (wants_a_) expect(a);
    if (wants_b_) expect(b);
    b_.set_requires_grad(wants_b_);
  }

  void add(int64_t begin, int64_t end, const PairwiseFunction& function, const Batch& targets) {
    at::Tensor rows = a_.slice(0, begin, end);
    if (wants_a_) rows = rows.detach().set_requires_grad(true);
    const at::Tensor positions =
        at::arange(begin, end, a_.options().dtype(at::kLong).requires_grad(false));
    const at::Tensor value = one_number(function(rows, b_, positions, targets), kFunction);
    type_ = value.scalar_type();
    total_.add_(value.detach());
    if (!value.requires_grad()) return;

    edge_list wanted;
    std::vector<at::Tensor> into;  // where each gradient is added
    size_t slot = 0;
    if (wants_a_) {
      wanted.push_back(torch::autograd::impl::gradient_edge(rows));
      into.push_back(gradients_[slot++].slice(0, begin, end));
    }
    if (wants_b_) {
      wanted.push_back(torch::autograd::impl::gradient_edge(b_));
      into.push_back(gradients_[slot]);
    }
    find_leaves(value, wanted);
    const std::vector<at::Tensor> found = autograd::gradients_at(value, wanted);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i].defined()) continue;
      if (i < into.size()) {
        into[i].add_(found[i]);
      } else {
        add_to_leaf(wanted[i], found[i]);
      }
    }
  }

  at::Tensor result() {
    const at::Tensor value = total_.to(type_.value_or(a_.scalar_type()));
    return with_gradients(kPairwise, value, std::move(edges_), std::move(gradients_));
  }

 private:
  void expect(const at::Tensor& side) {
    edges_.push_back(torch::autograd::impl::gradient_edge(side));
    gradients_.push_back(at::zeros_like(side.detach(), at::MemoryFormat::Contiguous));
  }

  /// What else the value depends on: parameters that the function knows. Found in the graph, where
  /// they are whatever has no further edges.
  static void find_leaves(const at::Tensor& value, edge_list& wanted) {
    const auto is_known = [&](const Edge& edge) {
      return std::any_of(wanted.begin(), wanted.end(),
                         [&](const Edge& known) { return known == edge; });
    };
    const auto note = [&](const Edge& edge) {
      if (edge.function && edge.function->num_outputs() == 0 && !is_known(edge)) {
        wanted.push_back(edge);
      }
    };
    if (!value.grad_fn()) note(torch::autograd::impl::gradient_edge(value));
    autograd::walk_graph({value}, [&](Node& node) {
      for (const Edge& edge : node.next_edges()) note(edge);
    });
  }

  void add_to_leaf(const Edge& edge, const at::Tensor& gradient) {
    const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
    const size_t own = static_cast<size_t>(wants_a_) + static_cast<size_t>(wants_b_);
    for (size_t i = own; i < edges_.size(); ++i) {
      if (edges_[i] == edge) {
        gradients_[i].add_(dense);
        return;
      }
    }
    edges_.push_back(edge);
    gradients_.push_back(dense.clone());
  }

  const at::Tensor a_;
  at::Tensor b_;
  const bool wants_a_, wants_b_;
  at::Tensor total_;
  std::optional<at::ScalarType> type_;
  // Of a, of b, then of the function's own leaves, as they turn up.
  edge_list edges_;
  std::vector<at::Tensor> gradients_;
};

void check(const PairwiseFunction& function, const PairwiseLossOptions& options) {
  if (!function) throw InvalidArgument(std::string(kPairwise) + " needs a function of a tile");
  check_reduction(kPairwise, options.reduction);
  check_tile(kPairwise, options.tile);
}

}  // namespace

at::Tensor pairwise(const at::Tensor& a, const at::Tensor& b, const PairwiseFunction& function,
                    const Batch& targets, const PairwiseLossOptions& options) {
  check(function, options);
  check_pair(kPairwise, a, b);
  const int64_t tile = rows_of_tile(kPairwise, options.tile, a.size(0), b.size(0), b.size(1),
                                    static_cast<int64_t>(b.element_size()));
  Tiles tiles(a, b);
  for (int64_t begin = 0; begin < a.size(0); begin += tile) {
    tiles.add(begin, std::min(begin + tile, a.size(0)), function, targets);
  }
  return reduced(tiles.result(), options.reduction, a.size(0));
}

CoupledLoss pairwise(PairwiseFunction function, PairwiseLossOptions options,
                     std::optional<at::Device> device) {
  check(function, options);
  return {kPairwise,
          [function = std::move(function), options](const Batch& outputs, const Batch& targets) {
            const std::vector<at::Tensor> tensors = outputs.tensors();
            const bool self = tensors.size() == 1 && tensors[0].dim() == 2;
            const auto [a, b] =
                self ? std::pair(tensors[0], tensors[0]) : pair_of(kPairwise, outputs);
            return pairwise(a, b, function, targets, options);
          },
          device};
}

}  // namespace infinitybatch::losses
