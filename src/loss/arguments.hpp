#pragma once

#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// What all ready-made losses need: the tensors that a criterion is called with, checked and in the
// right precision, and the two kinds of denominator that shapes alone decide.
namespace infinitybatch::losses {

/// What a criterion takes.
struct Signature {
  const char* text;  ///< for messages: "(input; target)"
  size_t least = 2;  ///< tensors of outputs and targets together
  size_t most = 2;
  size_t most_of_outputs = 1;
};

/// The tensors of the outputs, then those of the targets, as they are.
/// \throws InvalidArgument where there are too many or too few
std::vector<at::Tensor> raw_arguments(const std::string& name, const Batch& outputs,
                                      const Batch& targets, const Signature& signature);

/// The same with half precision widened to float32.
std::vector<at::Tensor> arguments(const std::string& name, const Batch& outputs,
                                  const Batch& targets, const Signature& signature);

/// float16 and bfloat16 as float32, anything else as it is (undefined included).
at::Tensor widened(const at::Tensor& tensor);

/// A criterion's own tensor where `input` is, widened; undefined stays undefined.
at::Tensor beside(const at::Tensor& weight, const at::Tensor& input);

/// The floating point type in which a device adds up denominators.
at::ScalarType accumulation_type(const at::Device& device);

/// "[3, 4]"
std::string shape_of(const at::Tensor& tensor);

/// The tensor leaf of the targets that stands at `position`.
/// \throws InvalidArgument where there is none, or where every micro-batch would see it whole
const Leaf& target_leaf(const std::string& name, const Batch& targets, size_t position);

/// Makes sure that broadcasting `input` against `other` leaves the batch dimension alone.
/// \throws InvalidArgument naming both shapes
void check_broadcast(const std::string& name, const at::Tensor& input, const at::Tensor& other,
                     const Leaf& target);

/// Makes sure that every tensor has the same rank, at least `least_rank`, and the same size(0).
void check_samples(const std::string& name, const std::vector<at::Tensor>& tensors,
                   int64_t least_rank, const char* signature);

/// Makes sure that a criterion's own weight belongs to no sample in particular.
/// \param option   the weight's name: "weight", "pos_weight"
/// \param as_target how such weights are given with the targets: "(target, weight)"
void check_weight(const std::string& name, const char* option, const at::Tensor& weight,
                  const at::Tensor& input, const Leaf& target, const char* as_target);

/// \throws InvalidArgument for `batchmean`, which only kl_div knows
void check_reduction(const std::string& name, Reduction reduction);

/// `sum` over `actual` losses where the denominator counts `counted`: they differ by a constant
/// factor where arguments were broadcast. Nothing happens for reduction 'sum'.
at::Tensor rescaled(const at::Tensor& sum, Reduction reduction, int64_t counted, int64_t actual);

/// mean: the number of elements of the first target.
SeparableLoss::Denominator count_elements(std::string name, Reduction reduction);

/// mean and batchmean: the number of samples.
SeparableLoss::Denominator count_samples(Reduction reduction);

}  // namespace infinitybatch::losses
