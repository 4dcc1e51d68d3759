#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

namespace infinitybatch::losses {

struct CTCLossOptions {
  int64_t blank = 0;
  bool zero_infinity = false;
  Reduction reduction = Reduction::mean;
};

/// Outputs log_probs (T, N, C) and targets (target, input_lengths, target_lengths), or outputs
/// (log_probs, input_lengths) and targets (target, target_lengths). Target is (N, S), padded with
/// anything; lengths are (N). The batch is dimension 1 of log_probs.
/// `mean` divides each sample by its target's length (0 counts as 1), then by N: the denominator.
/// \throws InvalidArgument where the targets are concatenated; see `pad_ctc_targets`
SeparableLoss ctc(CTCLossOptions options = {});

/// Concatenated targets, which cannot be split by samples, as the (N, S) that can; S is the longest
/// target's length. The lengths are read on the host.
/// \param concatenated (sum of target_lengths)
/// \param target_lengths (N) integers
/// \throws InvalidArgument where the lengths do not add up to the number of targets
at::Tensor pad_ctc_targets(const at::Tensor& concatenated, const at::Tensor& target_lengths);

}  // namespace infinitybatch::losses
