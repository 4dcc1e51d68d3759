#pragma once

#include "execute/profile.hpp"

#include <infinitybatch/execute/plan.hpp>

namespace infinitybatch {

/// The peak of live bytes that running `plan` will reach, read off the same instructions that the
/// executor runs. Not covered: the penalty's own memory, and what hooks allocate during hand-out.
/// \param baseline live bytes when the step began
/// \param whole_loss what the loss of all outputs does; measured, for its memory follows no rule
/// \param outputs_offload of a coupled loss, and their gradients, each micro-batch's for itself
/// \param begun    earlier micro-batches of the step have filled the gradient buffers already
int64_t simulate_peak(const Plan& plan, const MicroBatchProfile& profile, int64_t baseline,
                      bool begun = false, MicroBatchProfile::Effect whole_loss = {},
                      bool outputs_offload = false);

/// Bytes of a micro-batch's outputs as far as they want a gradient: 0 where only one pass is made.
/// \param index of the micro-batch
int64_t outputs_of(const MicroBatchProfile& profile, const Plan& plan, size_t index);

/// Of all outputs, joined for the whole batch, the largest one's bytes.
int64_t largest_joined(const MicroBatchProfile& profile, const Plan& plan);

}  // namespace infinitybatch
