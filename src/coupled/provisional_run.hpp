#pragma once

#include "coupled/part_of_batch.hpp"

#include <ATen/core/TensorBody.h>

#include <functional>
#include <vector>

namespace infinitybatch::coupled {

/// Runs a function of the whole batch on the rows of one micro-batch, for a result of the right
/// form whose values will not last: while forward is recorded the others are not known.
///
/// Where it fails on so few rows (groups of four) it is given these rows repeated, twice as many
/// each time and in the end as many as the whole batch has, then with their values disturbed (equal
/// rows have a singular covariance), and the first rows of what it returns are taken. A single
/// sample is always repeated. Torch's default
/// generators stay where they are: the run that counts draws for itself.
/// \param run    gives one row for each row of the first input, or throws
/// \param inputs (rows, …) each; they share no memory with the result
/// \throws CouplingError where it fails whatever it is given, and says why; or where it draws
///                       random numbers which have to be those of the whole batch's own run
/// \throws what `run` throws where that is an error of this library's, or no memory is left
at::Tensor run_provisionally(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& run,
                             const std::vector<at::Tensor>& inputs, const PartOfBatch::Facts& part);

}  // namespace infinitybatch::coupled
