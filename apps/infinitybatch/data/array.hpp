#pragma once

#include "data/mapped_file.hpp"

#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace infinitybatch::app {

/// The number of elements of `shape` times `item_bytes`.
/// \throws DataError naming `file` where a size is negative or the product does not fit in 63 bits:
///         headers come from outside and may say anything
int64_t checked_bytes(const MappedFile& file, const std::vector<int64_t>& shape,
                      int64_t item_bytes);

/// \throws DataError where the file does not hold `expected` bytes from `offset` on
void check_length(const MappedFile& file, int64_t offset, int64_t expected);

/// A tensor over the file's bytes from `offset` on; it keeps the file mapped. Read it only.
/// \param fortran_order whether the first index varies fastest
/// \throws DataError where the file is shorter or longer than the shape says, or `offset` is not
///         aligned for the type
at::Tensor array_in_file(std::shared_ptr<const MappedFile> file, int64_t offset,
                         const std::vector<int64_t>& shape, at::ScalarType type,
                         bool fortran_order = false);

}  // namespace infinitybatch::app
