#pragma once

#include <infinitybatch/loss/loss.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>

// What criteria over classes share: the weight of their targets, and what an option may be.
namespace infinitybatch::losses {

/// Floating point targets are class probabilities, integers class indices.
bool are_probabilities(const at::Tensor& targets);

/// The sum of weight[target] over the targets that are not ignored; their number without weights.
DenominatorPart weight_of_indices(const at::Tensor& targets, const at::Tensor& weight,
                                  int64_t ignore_index);

/// \throws InvalidArgument outside of [0, 1]
void check_smoothing(const std::string& name, double label_smoothing);

}  // namespace infinitybatch::losses
