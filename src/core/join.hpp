#pragma once

#include <infinitybatch/core/batch.hpp>

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

/// \throws Unsupported where one of these outputs of a micro-batch is sparse: what follows its rows
/// cannot be told from its shape, nor its rows be taken
void refuse_sparse(const Batch& outputs);

}  // namespace infinitybatch
