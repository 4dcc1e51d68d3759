#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace infinitybatch {

/// The dimension along which a leaf has `size` samples, where it is not its first; -1 without one.
int64_t dimension_of(const Leaf& leaf, int64_t size);

/// The size of the second dimension, where all have one and nobody has said which the samples have;
/// -1 where they differ.
int64_t second_size(const Batch& batch);

/// How many samples there are where they lie along the second dimension of all, as far as sizes and
/// types allow that and nobody has said otherwise; else -1.
int64_t time_first_size(const Batch& batch);

/// That, for a message: a clause without a stop; empty where nothing is likely.
std::string time_first_advice(const Batch& batch);

/// How to say that the samples of a leaf lie along `dim`: an argument by its name, else a mark.
std::string batch_dim_of(const Batch& batch, size_t leaf, int64_t dim);

/// What to mark where a batch of `samples` cannot be split along its first dimension, as a sentence
/// behind a blank: a dimension only where its size fits, and shared only beside something that is
/// split. Empty where neither is possible.
std::string marks_that_fit(const Batch& batch, std::string_view name, int64_t samples);

}  // namespace infinitybatch
