#pragma once

#include "data/mapped_file.hpp"

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// What the header of a `.npy` file says (numpy.lib.format, versions 1.0, 2.0 and 3.0).
struct NpyHeader {
  std::string type;  ///< NumPy's `descr`: "<f4", "|u1"
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

/// Reads the Python dictionary in a header: {'descr': '<f4', 'fortran_order': False, 'shape': (2,),
/// } \param path for messages \throws DataError where it is anything else
NpyHeader parse_npy_header(const std::string& path, const std::string& text);

/// True where the file begins with NumPy's magic bytes.
bool looks_like_npy(const std::string& path);

/// Reads a NumPy array of bool, integers of 8 to 64 bits or floats of 16 to 64, in either byte
/// order and either order of dimensions.
/// \param file a `.npy` file, or one that was unpacked from an archive
/// \return a tensor over the mapped file, or over a converted copy where torch has no such type
/// \throws DataError for anything else, with the NumPy call that mends it
at::Tensor read_npy(std::shared_ptr<const MappedFile> file);
at::Tensor read_npy(const std::string& path);

}  // namespace infinitybatch::app
