#pragma once

#include <infinitybatch/core/batch.hpp>

#include <ATen/core/TensorBody.h>

#include <string>
#include <vector>

namespace infinitybatch {

/// The rows of micro-batches as one tensor.
/// \param like how samples lie in each of them, and in what is made of them
/// \param name of the tensor, for people: "outputs['logits']"
/// \throws BatchError where the parts differ in another dimension (padded to their own longest
/// sample)
at::Tensor join_rows(const std::vector<at::Tensor>& parts, const Leaf& like,
                     const std::string& name);

/// Rows of each sample along the first dimension of an output in which several lie.
/// \throws BatchError where micro-batches have not equally many
int64_t places_of(const std::vector<at::Tensor>& parts, const std::vector<int64_t>& row_counts,
                  const std::string& name);

/// \throws Unsupported where one of these outputs of a micro-batch is sparse: what follows its rows
/// cannot be told from its shape, nor its rows be taken
void refuse_sparse(const Batch& outputs);

}  // namespace infinitybatch
