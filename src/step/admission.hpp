#pragma once

#include "execute/problem.hpp"

#include <infinitybatch/step/batch_dim.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Reads from `model` what one step needs and refuses what no step can be exact on, before anything
/// runs: `no_grad`, batches of different sizes, tensor subclasses, inference tensors.
/// `problem.model`, `problem.loss`, `problem.inputs` and `problem.targets` are set already.
void admit(Problem& problem);

/// A problem that is admitted; \param inputs, targets outlive it, as model and loss do
Problem admitted(const Model& model, const Loss& loss, const BatchSource& inputs,
                 const BatchSource& targets);

/// Targets without any tensor: a loss that needs none is called with what the user passed, an empty
/// tuple, say.
BatchSource no_targets(const Batch& targets, int64_t size);
/// Targets as a source of `size` rows; those of a coupled loss as `whole_targets`, and of another
/// one without rows as `targets_as_given`.
BatchSource targets_source(const Batch& targets, int64_t size, const Loss& loss);
/// The same of what is a source already.
BatchSource targets_for(const Loss& loss, const BatchSource& targets, int64_t samples);

/// Both sides of a step.
struct Sources {
  BatchSource inputs;
  BatchSource targets;
};
/// With samples along the dimensions that `Options::batch_dim` says.
/// \throws BatchError as `mark_inputs`, `mark_targets` and `BatchSource::from`
Sources sources_of(const Batch& inputs, const Batch& targets, const std::optional<BatchDim>& given,
                   const Loss& loss);
/// Where sources are what was given. \throws InvalidArgument with `Options::batch_dim`
void refuse_batch_dim(const std::optional<BatchDim>& given);

/// The part of `admit` that looks at the model alone: parameters, buffers, device.
void admit_model(Problem& problem);

/// Every tensor that the step reaches from the start: parameters, their gradients and buffers.
std::vector<at::Tensor> reachable_tensors(const Problem& problem);

/// Parameters and buffers, which recordings that are used again belong to (`StaticTapes::owned`).
std::vector<const void*> owned_by(const Problem& problem);

}  // namespace infinitybatch
