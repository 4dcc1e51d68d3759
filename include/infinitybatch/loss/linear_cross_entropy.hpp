#pragma once

#include <infinitybatch/loss/classification.hpp>

#include <cstdint>
#include <optional>

namespace infinitybatch::losses {

/// What a head of many classes has beside a cross entropy.
struct LinearHeadOptions {
  /// Above 0: logits are softcap · tanh(logits / softcap), as in Gemma 2 (Riviere et al. 2024).
  double softcap = 0;
  /// Rows (tokens) whose logits are held at once. Nothing: as many as take the bytes of the
  /// linear_weight, or 1 MiB where that is more; at most 256.
  std::optional<int64_t> tile = std::nullopt;
};

/// Cross entropy of logits that a linear layer of the loss's own makes of the outputs, as
/// torch.nn.functional.linear_cross_entropy: a language model's head. The logits of all tokens are
/// never held: tiles of rows are computed with their gradients, at the three matrix products that
/// the plain way takes. What is held beside a tile are the gradients of outputs, linear_weight and
/// linear_bias, in float32 where they are of half precision. Under autocast products are computed
/// in its type, as natively; all else in float32.
///
/// Outputs (N, ..., features); targets class indices (N, ...), or class probabilities
/// (N, ..., C). A linear_weight (C, d1, ..., features) takes outputs (N, features) and targets
/// (N, d1, ...) or (N, C, d1, ...), as torch does. Denominator of `mean`: as in `cross_entropy`.
///
/// \param linear_weight (C, d1, ..., features); may require grad, and may be a weight of the
///                      model's own (tied)
/// \param linear_bias   (C, d1, ...) or undefined; may require grad
/// \throws InvalidArgument for shapes, types or devices that do not fit
SeparableLoss linear_cross_entropy(at::Tensor linear_weight, at::Tensor linear_bias = {},
                                   CrossEntropyLossOptions options = {},
                                   LinearHeadOptions head = {});

/// The same as a plain function of tensors, for any torch code.
/// \return 0-dimensional, in the logits' type, at least float32; backward under create_graph is a
///         typed error
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight,
                                const at::Tensor& target, const at::Tensor& linear_bias = {},
                                const CrossEntropyLossOptions& options = {},
                                const LinearHeadOptions& head = {});

}  // namespace infinitybatch::losses
