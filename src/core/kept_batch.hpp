#pragma once

#include <infinitybatch/core/batch_source.hpp>

#include <string>

namespace infinitybatch {

/// The batch whose rows a source gives; null where it makes them.
const Batch* kept_batch(const BatchSource& source);

/// Targets of a loss that is not known yet: a coupled one sees them whole and needs no rows.
/// Where they have none, size is 0 and `why_no_rows` the message of `BatchSource::from`.
BatchSource targets_as_given(const Batch& targets);

/// Empty where the source has rows.
std::string why_no_rows(const BatchSource& source);

/// What a coupled loss is given beside `samples` inputs: tensors without a row for each of them
/// stand whole, for callbacks of micro-batches too, and tell kinds of batch apart no more than the
/// samples do. Sources that make their rows stay as they are.
BatchSource whole_targets(const BatchSource& targets, int64_t samples);

}  // namespace infinitybatch
