#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "data/mapped_file.hpp"

namespace infinitybatch::app {

/// The number of elements of `shape` times `item_bytes`.
/// \throws DataError naming `file` where a size is negative or the product does not fit in 63 bits:
///         headers come from outside and may say anything
int64_t checked_bytes(const MappedFile& file, const std::vector<int64_t>& shape,
                      int64_t item_bytes);

/// A tensor over the file's bytes from `offset` on; it keeps the file mapped. Read it only.
/// \throws DataError where the file is shorter or longer than the shape says, or `offset` is not
///         aligned for the type
at::Tensor array_in_file(std::shared_ptr<const MappedFile> file, int64_t offset,
                         const std::vector<int64_t>& shape, at::ScalarType type);

}  // namespace infinitybatch::app
