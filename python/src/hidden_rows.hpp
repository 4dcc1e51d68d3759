#pragma once

#include <infinitybatch/core/batch.hpp>

#include <pybind11/pybind11.h>

#include <cstdint>

namespace infinitybatch::python {

/// What is no tensor goes whole to every micro-batch.
/// \param value   what `batch` was read from; the caller holds the GIL
/// \param samples beside it; 0 where nobody knows
/// \param name    for messages: "inputs"
/// \throws BatchError where a part of it looks as if it had one entry for each sample, or is an
///         object of an unregistered dataclass that holds tensors
void refuse_hidden_rows(pybind11::handle value, const Batch& batch, int64_t samples,
                        const char* name);

}  // namespace infinitybatch::python
