#pragma once

#include <ATen/core/TensorBody.h>

#include <string>

namespace infinitybatch::app {

/// True where the file begins as IDX files of unsigned bytes do.
bool looks_like_idx(const std::string& path);

/// Reads an IDX file, the format of MNIST: two zero bytes, the element type (0x08, unsigned bytes,
/// alone is read), the number of dimensions, each dimension as a big-endian 32-bit number, the
/// data. \return a tensor of bytes over the mapped file; shape as in the header \throws DataError
/// for anything else, compressed files included
at::Tensor read_idx(const std::string& path);

}  // namespace infinitybatch::app
