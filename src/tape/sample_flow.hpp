#pragma once

#include "tape/tape.hpp"

#include <vector>

namespace infinitybatch::tape {

/// For each leaf of the tape's result: whether its values may come from the samples. They go from
/// op to op and through memory; what only takes its form from them (`zeros_like`, `new_ones`) does
/// not come from them. Python numbers are not followed: whoever relies on the answer has to see the
/// same values for other samples, and another number of them. True for what is no tensor, and for
/// all leaves where the tape is opaque.
/// \param inputs of the recording, without their tensors maybe; shared leaves hold no samples
std::vector<bool> from_samples(const Tape& tape, const Batch& inputs);

/// Whether two recordings of the same micro-batch do the same with the samples, op by op: they may
/// differ in what forward makes of nothing but constants and parameters (a table that it keeps).
bool same_of_samples(const Tape& a, const Tape& b, const Batch& inputs);

}  // namespace infinitybatch::tape
