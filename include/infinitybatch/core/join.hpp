#pragma once

#include <ATen/core/TensorBody.h>

#include <string>
#include <vector>

namespace infinitybatch {

/// The rows of micro-batches as one tensor.
/// \param dim along which samples lie
/// \param name of the tensor, for people: "outputs['logits']"
/// \throws BatchError where the parts differ in another dimension (padded to their own longest
/// sample)
at::Tensor join_rows(const std::vector<at::Tensor>& parts, int64_t dim, const std::string& name);

}  // namespace infinitybatch
