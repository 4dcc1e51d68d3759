#pragma once

#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/reduction.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

// Contrastive losses that never hold the matrix of all scores: they walk it in tiles of rows and
// compute value and gradients together, so that their memory is O(B·(D + tile)) where the plain
// formula takes O(B²). Exact, temperature and bias included.
//
// Each stands here twice: as a loss for VirtualBatch, and as a plain function of tensors for any
// torch code. Half precision embeddings are computed in float32, under autocast too. Gradients are
// kept from forward to backward, as many bytes as the embeddings; a second derivative is a typed
// error of backward. `tile` is the number of rows whose scores are held at once; nothing: as many
// as take the bytes of the columns themselves, or 1 MiB where that is more, at most 256.
namespace infinitybatch::losses {

/// A number of a loss that may be learned: a number, a tensor of one element (a parameter), or a
/// function that makes such a tensor anew each time (`[=] { return log_scale.neg().exp(); }`).
using Learnable = std::variant<double, at::Tensor, std::function<at::Tensor()>>;

struct InfoNCELossOptions {
  Learnable temperature = 0.07;  ///< scores are divided by it; above 0
  bool normalize = true;         ///< embeddings are divided by their length (at least 1e-12) first
  bool symmetric = true;         ///< rows against columns and columns against rows, half each
  Reduction reduction = Reduction::mean;
  std::optional<int64_t> tile = std::nullopt;
};

/// InfoNCE (van den Oord et al. 2018); symmetric as in CLIP (Radford et al. 2021):
///     -log(exp(s_ii) / sum_j exp(s_ij)), s_ij = a_i · b_j / temperature,
/// `mean` over the pairs. Outputs (a, b) of shapes (N, D), or one tensor (N, 2, D), or (a, b, s) as
/// CLIP's: s of one element is 1 / temperature, in its place; no targets.
CoupledLoss info_nce(InfoNCELossOptions options = {},
                     std::optional<at::Device> device = std::nullopt);

/// \param a (N, D)
/// \param b (M, D); b_i belongs to a_i, what follows them are more negatives: M above N where not
///          symmetric
/// \return 0-dimensional
/// \throws InvalidArgument for other shapes, types or devices, a tile below 1, a temperature that
///         is not above 0 (a tensor's value is looked at on the host only)
at::Tensor info_nce(const at::Tensor& a, const at::Tensor& b,
                    const InfoNCELossOptions& options = {});

struct SupConLossOptions {
  Learnable temperature = 0.07;
  bool normalize = true;
  Reduction reduction = Reduction::mean;
  std::optional<int64_t> tile = std::nullopt;
};

/// Supervised contrastive loss (Khosla et al. 2020, equation 2, L_out):
///     -1/|P(i)| sum_{p in P(i)} log(exp(s_ip) / sum_{j != i} exp(s_ij)),
/// P(i) all others of i's label; 0 where there are none. `mean` over all embeddings, those without
/// any included, as the authors' code does. Outputs (N, D), or (N, V, D) with V views of each
/// sample; targets (N) integer labels, or none: each sample is a class of its own (SimCLR).
CoupledLoss sup_con(SupConLossOptions options = {},
                    std::optional<at::Device> device = std::nullopt);

/// \param embeddings (N, D) or (N, V, D)
/// \param labels     (N) integers, or undefined
/// \throws InvalidArgument as `info_nce`, and for labels of another type or shape
at::Tensor sup_con(const at::Tensor& embeddings, const at::Tensor& labels,
                   const SupConLossOptions& options = {});

struct SigLIPLossOptions {
  Learnable temperature = 0.1;  ///< scores are divided by it; the paper's t is 1 / temperature
  Learnable bias = -10.0;       ///< added to scores
  bool normalize = true;
  Reduction reduction = Reduction::mean;
  std::optional<int64_t> tile = std::nullopt;
};

/// Sigmoid loss of pairs (Zhai et al. 2023):
///     -sum_j log sigmoid(y_ij (a_i · b_j / temperature + bias)), y_ij 1 where i = j, else -1,
/// `mean` over the rows. Outputs as in `info_nce`; no targets.
CoupledLoss siglip(SigLIPLossOptions options = {}, std::optional<at::Device> device = std::nullopt);

/// \param a (N, D)
/// \param b (M, D), M at least N: b_i belongs to a_i
at::Tensor siglip(const at::Tensor& a, const at::Tensor& b, const SigLIPLossOptions& options = {});

/// The sum of some rows' losses, each of which may look at all columns.
/// \param rows      (t, D) of the first embeddings
/// \param columns   (M, D): all of the second
/// \param positions (t) int64: which rows these are
/// \param targets   all targets, as they were given
/// \return one number that carries gradient
using PairwiseFunction =
    std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& columns,
                             const at::Tensor& positions, const Batch& targets)>;

struct PairwiseLossOptions {
  Reduction reduction = Reduction::mean;  ///< `mean`: divided by the number of rows
  std::optional<int64_t> tile = std::nullopt;
};

/// A loss of the user's own that is a sum over rows. Each tile runs forward and backward at once
/// and is forgotten, so that its memory is one tile's graph. Parameters that `function` uses get
/// their gradients; those that enter otherwise than through autograd's graph do not.
/// Outputs (a, b), one tensor (N, 2, D), or one tensor (N, D) that is compared with itself.
CoupledLoss pairwise(PairwiseFunction function, PairwiseLossOptions options = {},
                     std::optional<at::Device> device = std::nullopt);

/// \throws InvalidArgument where `function` is nothing or gives more than one number
at::Tensor pairwise(const at::Tensor& a, const at::Tensor& b, const PairwiseFunction& function,
                    const Batch& targets = {}, const PairwiseLossOptions& options = {});

}  // namespace infinitybatch::losses
