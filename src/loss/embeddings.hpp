#pragma once

#include <infinitybatch/loss/contrastive.hpp>

#include <string>
#include <utility>

// What contrastive losses are called with, checked.
namespace infinitybatch::losses {

/// The tensor of a learnable number, 0-dimensional or of one element, with its graph; undefined
/// where it is a plain number, which `number_of` gives.
at::Tensor tensor_of(const std::string& name, const char* option, const Learnable& value);

/// \throws InvalidArgument for a plain number, or a tensor on the host, that is not above 0
void check_positive(const std::string& name, const char* option, const Learnable& value,
                    const at::Tensor& tensor);

/// The value without graph, 0-dimensional, of the scores' type and device.
at::Tensor value_of(const Learnable& value, const at::Tensor& tensor, const at::Tensor& like);

/// (a, b) of outputs, which are two tensors or one of shape (N, 2, D).
std::pair<at::Tensor, at::Tensor> pair_of(const std::string& name, const Batch& outputs);

/// \throws InvalidArgument unless both are floating point (N, D), of one device, type and D
void check_pair(const std::string& name, const at::Tensor& a, const at::Tensor& b);

/// \throws InvalidArgument where there are targets
void check_no_targets(const std::string& name, const Batch& targets);

/// `sum`, divided by `rows` for the mean.
at::Tensor reduced(const at::Tensor& sum, Reduction reduction, int64_t rows);

}  // namespace infinitybatch::losses
